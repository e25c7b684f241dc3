"""Where log-partitions are too large to hold: the right limit, or one sentence, and never NaN."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.measures import (
    Atoms,
    Gaussian,
    Poisson,
    Spin,
    affine,
    boosting,
    convolve,
    hybrid,
    mixture,
    power,
    product,
)


def counts(*rates: float) -> Poisson:
    return Poisson.create(torch.tensor(rates))


def normal(mean: float, variance: float) -> Gaussian:
    return Gaussian.create(torch.tensor([mean]), torch.tensor(variance))


def mixed(*parts):
    return mixture(torch.zeros(len(parts)), list(parts))


@every_row(
    ("measure", "eta", "mean", "variance"),
    [
        # exp 1000 is no float: the mean and the variance of every count are.
        (mixed(counts(1.0), counts(2.0)), [1000.0], [math.inf], [math.inf]),
        (mixed(counts(1.0, 1.0), counts(2.0, 1.0)), [1000.0, 0.0], [math.inf, 1.0], [math.inf, 1.0]),
        (mixed(counts(1.0), Atoms.create(torch.tensor([[0.0], [3.0]]))), [1000.0], [math.inf], [math.inf]),
        (mixed(normal(0.0, 1.0), counts(1.0)), [1000.0], [math.inf], [math.inf]),
        (power(mixed(counts(1.0), counts(2.0)), 2), [1000.0], [math.inf], [math.inf]),
        (affine(counts(1.0, 3.0), torch.eye(2)), [1000.0, 0.0], [math.inf, 3.0], [math.inf, 3.0]),
        (product(counts(1.0), Spin.create(dim=1)), [1000.0, 0.0], [math.inf, 0.0], [math.inf, 1.0]),
        # The second has outgrown the first by e¹⁰⁰⁰; the Gaussian the atoms, by e⁵⁰⁰⁰⁰⁰.
        (mixed(normal(0.0, 1.0), normal(1.0, 1.0)), [1000.0], [1001.0], [1.0]),
        (hybrid(Atoms.create(torch.tensor([[0.0], [3.0]])), normal(0.0, 1.0), 0.5), [1000.0], [1000.0], [1.0]),
        (hybrid(Atoms.create(torch.tensor([[0.0], [3.0]])), normal(0.0, 1.0), 0.5), [1e20], [1e20], [1.0]),
        (mixed(normal(0.0, 1.0), normal(0.0, 2.0)), [1000.0], [2000.0], [2.0]),
        (boosting(torch.tensor([1.0, -1.0]), torch.zeros(2), torch.tensor([[1.0], [0.5]])), [1000.0], [0.5], [0.0]),
    ],
)
def test_means_and_variances_where_one_term_is_all_there_is(measure, eta, mean, variance):
    at = torch.tensor(eta)
    assert torch.equal(measure.mean(at), torch.tensor(mean))
    assert measure.fisher(at).diagonal().tolist() == pytest.approx(variance, abs=0)
    others = measure.fisher(at) - torch.diag_embed(measure.fisher(at).diagonal().nan_to_num(posinf=0.0))
    assert not others.isnan().any()


@every_row("name", ["mean", "fisher", "entropy", "responsibilities", "sample", "kl"])
def test_shares_that_cannot_be_told_are_refused(name):
    """Both log-partitions, ½·10⁴⁰ and 10⁴⁰, are infinite in float32: the mean is 10²⁰ or twice that."""
    measure = mixed(normal(0.0, 1.0), normal(0.0, 2.0))
    eta = torch.tensor([1e20])
    exact = measure.to(torch.float64)
    assert exact.mean(eta.double()).tolist() == [2 * float(eta[0])]
    if name == "entropy":  # −10⁴⁰ or −½·10⁴⁰: minus infinity
        assert measure.entropy(eta) == -math.inf
        return
    if name in ("kl", "fisher"):  # float64 inside; the variances 1 and 2 differ
        eta = torch.tensor([1e160], dtype=torch.float64)
        measure = exact
    call = {"kl": lambda: measure.kl(eta, 0.5 * eta)}.get(name, lambda: getattr(measure, name)(eta))
    with pytest.raises(ValueError, match=r"log-partitions of components overflow torch.float.* smaller eta"):
        call()


def test_entropy_and_divergence_of_what_is_infinite():
    one = counts(1.0)
    both = mixed(counts(1.0), Atoms.create(torch.tensor([[1.0]])))
    eta = torch.tensor([1000.0])
    for measure in (one, both, convolve(one, one), product(one, one), power(one, 2)):
        at = eta.expand(measure.event_shape)
        assert measure.log_partition(at) == math.inf
        assert measure.entropy(at) == -math.inf
        assert measure.kl(at, at - 1) == math.inf
        assert measure.kl(at, at) == 0


def test_a_tilt_without_a_normaliser_is_refused():
    for measure in (counts(1.0), convolve(counts(1.0), counts(2.0)), affine(counts(1.0), torch.eye(1))):
        with pytest.raises(ValueError, match=r"tilt: A\(eta\) of \w+ is too large for torch.float32"):
            measure.tilt(torch.tensor([1000.0]))
    assert counts(1.0).tilt(torch.tensor([80.0])).mean(torch.zeros(1)).isfinite()


def test_entropy_of_a_mixture_of_far_laws_keeps_its_digits():
    """Two normals of one variance a long way from each other: −½ eta² of either, and log 2 of the choice."""
    eta = torch.tensor([300.0])
    measure = mixture(torch.zeros(2), [normal(1.0, 1.0), normal(-1.0, 1.0)])
    # p = N(301, 1), and h has the density of N(1, 1) there.
    assert float(measure.entropy(eta)) == pytest.approx(-0.5 * 300.0**2, rel=1e-6)


def test_counts_too_many_for_an_integer_are_drawn():
    """torch.poisson wraps at 2⁶³; the law is a normal one there, to 1e-9."""
    for rate in (1e17, 1e19, 1e25):
        draws = counts(rate).sample(torch.zeros(1), 2000, generator=torch.Generator().manual_seed(0)).double()
        assert (draws >= 0).all()
        error = math.sqrt(rate / 2000) + torch.finfo(torch.float32).eps * rate
        assert abs(float(draws.mean()) - rate) < 5 * error
    assert counts(1.0).sample(torch.tensor([1000.0])) == math.inf
