"""The contract: shapes, precision, values, transforms."""

import dataclasses

import mpmath
import pytest
import torch
from scipy.stats import expon
from tests.support.rows import every_row
from torch.utils import _pytree as pytree

from massieu.measures import Atoms, Exponential, Gaussian, Measure, Spin, affine, static_field
from massieu.measures.combine import Affine, Tilted


def measures(dtype=torch.float32):
    return [
        Atoms.create(torch.ones(2, 5, 3, dtype=dtype)),
        Gaussian.create(torch.zeros(2, 3, dtype=dtype), torch.ones(2, dtype=dtype)),
        Spin.create(torch.zeros(2, 3, dtype=dtype)),
        affine(Spin.create(torch.zeros(2, 4, dtype=dtype)), torch.ones(3, 4, dtype=dtype)),
        affine(Spin.create(torch.zeros(2, 3, dtype=dtype)), torch.eye(3, dtype=dtype)).tilt(
            torch.ones(2, 3, dtype=dtype)
        ),
    ]


@every_row("measure", measures(), ids=lambda measure: type(measure).__name__)
@every_row("query", [(), (1,), (4,), (4, 2), (0,)])
def test_queries_lie_between_batch_and_event(measure, query):
    eta = torch.full((2, *query, 3), 0.1)
    assert measure.batch_shape == (2,)
    assert measure.event_shape == (3,)
    assert measure.log_partition(eta).shape == (2, *query)
    assert measure.entropy(eta).shape == (2, *query)
    assert measure.kl(eta, eta).shape == (2, *query)
    assert measure.mean(eta).shape == (2, *query, 3)
    assert measure.fisher_vp(eta, eta).shape == (2, *query, 3)
    assert measure.fisher(eta).shape == (2, *query, 3, 3)
    if query != (0,):
        assert measure.sample(eta, (6, 1)).shape == (6, 1, 2, *query, 3)


@every_row("measure", measures(), ids=lambda measure: type(measure).__name__)
@every_row("shape", [(3,), (1, 4, 3), (2, 4, 1), (2, 4, 4), (3, 2, 3), ()])
def test_a_wrong_shape_names_both_and_never_broadcasts(measure, shape):
    name = type(measure).__name__
    for method in (measure.log_partition, measure.mean, measure.fisher, measure.entropy, measure.sample):
        with pytest.raises(ValueError, match=rf"{name} needs eta of shape \(2,\) \+ queries \+ \(3,\)") as error:
            method(torch.zeros(shape))
        assert str(shape) in str(error.value)
    with pytest.raises(ValueError, match=r"tilt needs eta of shape \(2, 3\)") as error:
        measure.tilt(torch.zeros(shape))
    assert str(shape) in str(error.value)
    eta = torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=r"eta_q must have shape \(2, 4, 3\), got \(2, 3\)"):
        measure.kl(eta, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"vector must have shape \(2, 4, 3\), got \(2, 3\)"):
        measure.fisher_vp(eta, torch.zeros(2, 3))


def test_eta_must_be_made_of_real_numbers():
    with pytest.raises(TypeError, match=r"eta must be real, got a tensor of torch\.complex64"):
        Spin.create(dim=2).mean(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"eta must be .* numbers to make one of, got '\w+'"):
        Spin.create(dim=2).mean("0")


def test_the_widest_dtype_wins():
    low, double = (Spin.create(torch.tensor([0.5, -1.0], dtype=dtype)) for dtype in (torch.bfloat16, torch.float64))
    for measure, eta in ((low, torch.zeros(2, dtype=torch.float64)), (double, torch.zeros(2, dtype=torch.float16))):
        for name in ("log_partition", "mean", "fisher", "entropy"):
            assert getattr(measure, name)(eta).dtype == torch.float64


def test_measures_are_frozen_pytrees():
    measure = affine(Spin.create(torch.zeros(2, 3)), torch.ones(4, 3)).tilt(torch.zeros(2, 4))
    leaves, structure = pytree.tree_flatten(measure)
    assert len(leaves) == 4
    rebuilt = pytree.tree_unflatten(leaves, structure)
    assert isinstance(rebuilt, Tilted)
    assert isinstance(rebuilt.measure, Affine)
    with pytest.raises(dataclasses.FrozenInstanceError):
        measure.eta = torch.ones(2, 4)  # pyright: ignore
    assert measure != rebuilt
    assert hash(measure) != hash(rebuilt)


def test_a_measure_passes_through_transforms_as_an_argument():
    points = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eta = torch.ones(3, dtype=torch.float64)
    gradient = torch.func.grad(lambda measure: measure.log_partition(eta))(Atoms.create(points))
    weights = torch.softmax(points @ eta, 0)
    assert isinstance(gradient, Atoms)
    torch.testing.assert_close(gradient.log_weight, weights)
    torch.testing.assert_close(gradient.points, weights[:, None] * eta)


def test_static_fields_are_structure():
    class Scaled(Measure):
        size: torch.Tensor
        power: int = static_field(default=2)

        def _log_partition(self, eta):
            return (self._align(self.size, eta) * eta**self.power).sum(-1)

    measure = Scaled(torch.ones(2))
    leaves, structure = pytree.tree_flatten(measure)
    assert len(leaves) == 1
    assert structure != pytree.tree_structure(Scaled(torch.ones(2), power=4))
    assert torch.func.vmap(lambda m, e: m.log_partition(e))(Scaled(torch.ones(3, 2), 4), torch.ones(3, 2)).tolist() == [
        2,
        2,
        2,
    ]


def test_a_measure_is_abstract_or_final():
    with pytest.raises(TypeError, match="Spin is final"):

        class Derived(Spin):
            pass

    with pytest.raises(TypeError, match="abstract"):
        Measure()  # pyright: ignore


def test_log_prob_takes_draws_of_any_shape():
    """As samples come: without query or sample dimensions, or with several; against SciPy."""
    rate = torch.tensor([0.5, 2.0], dtype=torch.float64)
    measure = Exponential.create(rate)
    for shape, query in [((), ()), ((3,), ()), ((), (4,)), ((3, 2), (4, 1)), ((0,), (4,))]:
        eta = torch.full((*query, 2), -0.25, dtype=torch.float64)
        point = measure.sample(eta, shape)
        expected = torch.from_numpy(expon(scale=1 / (rate + 0.25)).logpdf(point)).sum(-1)
        torch.testing.assert_close(measure.log_prob(eta, point), expected)
    with pytest.raises(ValueError, match=r"\(\*shape, \*\(2,\)\), got \(3,\)"):
        measure.log_prob(rate - 1, torch.ones(3))


def test_the_first_tensor_tells_the_shapes():
    class Coins(Measure):
        label: str = static_field()
        bias: torch.Tensor
        other: torch.Tensor

        def _log_partition(self, eta):
            return (self._align(self.bias, eta) * eta).sum(-1)

    class Named(Measure):
        label: str = static_field()

        def _log_partition(self, eta):
            return eta.sum(-1)

    coins = Coins("two", torch.zeros(2, 3), torch.zeros(()))
    assert (coins.batch_shape, coins.event_shape) == ((2,), (3,))
    with pytest.raises(TypeError, match="Named has no tensor to tell its shapes: override batch_shape and event_shape"):
        Named("none").log_partition(torch.zeros(2))


@pytest.mark.parametrize("change", [1e-6, 1e-3, 0.1, 3.0])
def test_the_divergence_of_a_measure_of_one_hook_keeps_its_digits(change):
    """Of a coin of ±1, A = log cosh; close parameters lose all digits in the Bregman difference, and none in its integral."""

    class Coin(Measure):
        size: torch.Tensor

        def _log_partition(self, eta):
            return (self._align(self.size, eta) * eta).cosh().log().sum(-1)

    with mpmath.workdps(50):
        start = mpmath.mpf(0.3)
        end = mpmath.mpf(0.3) + mpmath.mpf(change)
        exact = mpmath.log(mpmath.cosh(end)) - mpmath.log(mpmath.cosh(start)) - mpmath.tanh(start) * mpmath.mpf(change)
    at = torch.tensor([[0.3]], dtype=torch.float64)
    result = Coin(torch.ones(1, dtype=torch.float64))._kl(at, torch.full_like(at, change))
    assert abs(result.item() / float(exact) - 1) < 1e-12
