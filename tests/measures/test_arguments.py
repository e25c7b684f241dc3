"""What parameters and etas may be: numbers, lists, arrays and integers are converted, complex numbers refused."""

import itertools

import numpy as np
import pytest
import torch
from tests.support.rows import every_row

from massieu.duality import conjugate, natural
from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    ConjugatePrior,
    Constant,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Poisson,
    Sphere,
    Spin,
    Uniform,
    affine,
    boosting,
    convolve,
    hybrid,
    mixture,
    power,
)

MAKERS = {
    "Atoms": (Atoms.create, ([[0, 1], [2, 3]],)),
    "Gaussian, isotropic": (Gaussian.create, ([0, 1], 2)),
    "Gaussian, diagonal": (Gaussian.create, ([0, 1], [1, 2])),
    "Gaussian, full": (Gaussian.create, ([0, 1], [[2, 1], [1, 2]])),
    "Spin": (Spin.create, ([0, 1],)),
    "Bernoulli": (Bernoulli.create, ([0.25, 0.5],)),
    "Categorical": (Categorical.create, ([0.25, 0.75],)),
    "Poisson": (Poisson.create, ([1, 2],)),
    "Exponential": (Exponential.create, ([1, 2],)),
    "Gamma": (Gamma.create, ([1, 2], [3, 4])),
    "Laplace": (Laplace.create, ([1, 2],)),
    "Uniform": (Uniform.create, ([0, 1], [2, 3])),
    "Constant": (Constant.create, ([1, 2],)),
    "Sphere": (lambda radius: Sphere.create(radius, dim=2), (2,)),
    "ConjugatePrior": (lambda strength: ConjugatePrior.create(Spin.create(dim=2), strength), ([1, 2],)),
    "mixture": (lambda weight: mixture(weight, [Spin.create(dim=2), Spin.create([1, 1])]), ([0, 1],)),
    "affine": (lambda weight, bias: affine(Spin.create(dim=2), weight, bias), ([[1, 2], [0, 1]], [1, 2])),
    "boosting": (boosting, ([1, -1], [0, 1], [[1, 2], [3, 4]])),
    "hybrid": (lambda c: hybrid(Atoms.create([[0, 1]]), Gaussian.create([0, 0], 1), c), (2,)),
}
KINDS = {
    "numbers": lambda value: value,
    "arrays": np.array,
    "arrays of float32": lambda value: np.array(value, dtype=np.float32),
    "tensors": torch.tensor,
}


@pytest.mark.medium
@every_row(("name", "kind"), itertools.product(MAKERS, KINDS))
def test_one_measure_from_every_kind_of_numbers(name, kind):
    make, values = MAKERS[name]
    expected = make(*(torch.tensor(value, dtype=torch.get_default_dtype()) for value in values))
    result = make(*(KINDS[kind](value) for value in values))
    eta = torch.full(expected.event_shape, 0.125)
    for function in ("log_partition", "mean", "fisher"):
        value = getattr(result, function)(eta)
        assert value.is_floating_point()
        torch.testing.assert_close(value.float(), getattr(expected, function)(eta))
    torch.testing.assert_close(result.mean(eta.tolist()), result.mean(eta).to(result.mean(eta.tolist()).dtype))
    point = result.mean(np.zeros(tuple(expected.event_shape)) + 0.125)
    torch.testing.assert_close(point.float(), expected.mean(eta))


@every_row("name", MAKERS)
def test_complex_parameters_are_refused(name):
    make, values = MAKERS[name]
    for place in range(len(values)):
        given = [torch.tensor(value) for value in values]
        given[place] = given[place].to(torch.complex64)
        with pytest.raises(TypeError, match=r"\w+ must be real, got a tensor of torch\.complex64"):
            make(*given)


ONE_NUMBER = {
    "Gaussian": lambda **more: Gaussian.create(0, 1, **more),
    "Spin": lambda **more: Spin.create(0.5, **more),
    "Bernoulli": lambda **more: Bernoulli.create(0.5, **more),
    "Poisson": lambda **more: Poisson.create(2, **more),
    "Exponential": lambda **more: Exponential.create(2, **more),
    "Gamma": lambda **more: Gamma.create(1, 2, **more),
    "Laplace": lambda **more: Laplace.create(0.5, **more),
    "Uniform": lambda **more: Uniform.create(-1, 1, **more),
    "Constant": lambda **more: Constant.create(3, **more),
}
"""Measures whose parameters have shape (*batch, d)."""


@every_row("name", ONE_NUMBER)
def test_a_number_stands_for_as_many_coordinates_as_dim_says(name):
    make = ONE_NUMBER[name]
    one = make()
    three = make(dim=3)
    assert (one.event_shape, three.event_shape, three.batch_shape) == ((1,), (3,), ())
    eta = torch.tensor([0.1, -0.2, 0.3])
    torch.testing.assert_close(three.mean(eta).unsqueeze(-1), one.mean(eta.unsqueeze(-1)))
    for wrong, kind in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="dim must be a whole number"):
            make(dim=wrong)


@every_row(
    ("make", "message"),
    (
        (lambda: Poisson.create([1, 2], dim=3), r"rate must have shape \(3,\), got \(2,\)"),
        (lambda: Gamma.create([1, 2], 1, dim=3), r"shape must have shape \(3,\), got \(2,\)"),
        (lambda: Gaussian.create([[0, 1]], 1, dim=3), r"location must have shape \(1, 3\), got \(1, 2\)"),
        (lambda: Gaussian.create([], 1), r"location must have shape \(\*batch, d\) with d ≥ 1, got \(0,\)"),
        (lambda: Atoms.create(1.0), r"points must have shape \(\*batch, N, d\)"),
        (lambda: Categorical.create(1.0), r"probability must have shape \(\*batch, M\)"),
    ),
)
def test_dimensions_that_do_not_fit_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_number_stands_for_a_whole_batch():
    keys = torch.arange(6.0).reshape(3, 2)
    assert Gaussian.create(keys, 0.5).covariance.tolist() == [0.5] * 3
    assert Atoms.create(keys, -1).log_weight.tolist() == [-1.0] * 3
    assert Atoms.create(keys, False).log_weight.tolist() == [-torch.inf] * 3
    assert Sphere.create(torch.ones(3), dim=2).tilt(keys).batch_shape == (3,)
    assert Poisson.create(torch.ones(3, 2, dtype=torch.bfloat16)).rate.dtype == torch.bfloat16
    assert mixture(0, Gaussian.create(keys, 1)).log_weight.tolist() == [0.0] * 3


def test_one_number_is_one_coordinate_and_stands_for_all():
    line = Gaussian.create(0.0, 1.0)
    assert line.event_shape == (1,)
    assert line.fisher([0.3]).tolist() == [[1.0]]
    assert Poisson.create(2).mean([0]).tolist() == [2.0]
    assert Uniform.create(-1, torch.tensor([1.0, 2.0]).double()).mean([0, 0]).tolist() == [0.0, 0.5]
    assert ConjugatePrior.create(Spin.create(dim=3), 2.0).strength.tolist() == [2.0, 2.0, 2.0]
    # A number is as exact as what it stands beside.
    exact = hybrid(Atoms.create(torch.zeros(1, 1).double()), Gaussian.create(torch.zeros(1).double(), 1.0), 0.7)
    assert float(exact.log_partition([0.0]).exp()) == pytest.approx(1.7, rel=1e-15)
    integer = Gaussian.create(torch.zeros(2), torch.tensor([1, 2]))
    assert integer.fisher(torch.zeros(2)).dtype == torch.float32
    half = Spin.create(dim=2).log_prob([0, 0], [1, -1])
    assert float(half.exp()) == pytest.approx(0.25)


@every_row(
    ("call", "kind", "message"),
    [
        (lambda: Spin.create(dim=2).log_partition(torch.zeros(())), ValueError, r"eta of shape .*\(2,\).*, got \(\)"),
        (lambda: Spin.create(dim=2).mean(0.0), ValueError, r"eta of shape .*\(2,\).*, got \(\)"),
        (
            lambda: Spin.create(dim=2).tilt(0.0),
            ValueError,
            r"tilt needs eta of shape \(2,\) \(batch \+ event\), got \(\)",
        ),
        (lambda: Spin.create(dim=2).log_prob(torch.zeros(2), 1.0), ValueError, r"point must have shape .*got \(\)"),
        (lambda: natural(Spin.create(dim=2), 0.0), ValueError, r"mu of shape .*, got \(\)"),
        (lambda: conjugate(Spin.create(dim=2), torch.zeros(())), ValueError, r"mu of shape .*, got \(\)"),
        (lambda: Atoms.create(1.0), ValueError, r"points must have shape .*got \(\)"),
        (lambda: affine(Spin.create(dim=2), 1.0), ValueError, r"affine needs weight of shape .*got \(\)"),
        (lambda: power(Spin.create(dim=2), 1j), TypeError, "exponent must be a number, got complex"),
        (lambda: Spin.create(dim=2).sample([0, 0], -1), ValueError, "number of draws or a tuple .* got -1"),
        (lambda: Spin.create(dim=2).sample([0, 0], 2.5), ValueError, "number of draws or a tuple .* got 2.5"),
        (lambda: Spin.create(dim=2).sample([0, 0], (2, None)), ValueError, "number of draws or a tuple"),
        (
            lambda: Spin.create(dim=2).mean(torch.zeros(2, device="meta")),
            ValueError,
            "one device, got eta on meta",
        ),
        (lambda: Gaussian.create("zero", 1.0), TypeError, r"location must be .*numbers to make one of, got '\w+'"),
    ],
)
def test_what_is_no_argument_is_refused_in_one_sentence(call, kind, message):
    with pytest.raises(kind, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_number_of_draws_is_a_shape():
    for make, values in MAKERS.values():
        measure = make(*values)
        eta = torch.full(measure.event_shape, 0.125)
        for shape, expected in (
            (5, (5,)),
            (0, (0,)),
            ((2, 0), (2, 0)),
            (torch.Size([2, 3]), (2, 3)),
            ([4], (4,)),
            ((), ()),
        ):
            assert measure.sample(eta, shape).shape == (*expected, *eta.shape)


def test_nothing_is_a_batch():
    """An empty batch of atoms, and of means: empty results of the right shape, that derivatives pass."""
    atoms = Atoms.create(torch.zeros(0, 4, 3))
    eta = torch.zeros(0, 5, 3, requires_grad=True)
    assert atoms.log_partition(eta).shape == (0, 5)
    assert atoms.fisher(eta).shape == (0, 5, 3, 3)
    assert atoms.expectation(eta, torch.zeros(0, 4, 2)).shape == (0, 5, 2)
    atoms.log_partition(eta).sum().backward()
    assert eta.grad is not None and eta.grad.shape == (0, 5, 3)
    points = Atoms.create(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert natural(points, torch.zeros(0, 3)).shape == (0, 3)
    assert conjugate(convolve(points, Spin.create(dim=3)), torch.zeros(2, 0, 3)).shape == (2, 0)


@pytest.mark.slow
def test_measures_are_made_inside_compiled_code():
    """They are rebuilt in each forward pass."""

    def every_mean(half: torch.Tensor) -> list[torch.Tensor]:
        made = [
            Atoms.create(torch.stack([half, -half])),
            Gaussian.create(half, half),
            Spin.create(half),
            Bernoulli.create(half),
            Categorical.create(half),
            Poisson.create(half),
            Exponential.create(2 + half),
            Gamma.create(half, half),
            Laplace.create(half),
            Uniform.create(half, 2 * half),
            Constant.create(half),
            Sphere.create(half.sum(), dim=2),
            mixture(half, [Spin.create(half), Spin.create(-half)]),
            convolve(Spin.create(half), Gaussian.create(half, half)),
            affine(Spin.create(half), torch.eye(2)),
            power(Spin.create(half), 2),
        ]
        return [measure.mean(0.1 * half) for measure in made]

    half = torch.tensor([0.5, 0.5])
    compiled = torch.compile(every_mean, backend="eager", fullgraph=True)(half)
    for result, expected in zip(compiled, every_mean(half), strict=True):
        torch.testing.assert_close(result, expected)
