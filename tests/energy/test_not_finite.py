"""What is not finite stays so, or is an error; and numbers at the ends of a dtype's range are right ones."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.energy import (
    HopfieldEnergy,
    SparseAtoms,
    TransformerEnergy,
    activations,
    bounds,
    is_conservative,
    jacobian_asymmetry,
)
from massieu.measures import Atoms
from massieu.papers import theory
from massieu.papers.theory import ClusteringEnergy, LogSumReLU, asymptotic_scale, measured_cumulant_growth, path_length

DOUBLE = torch.float64
NAN = torch.full((2,), torch.nan)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


# --- is a map a gradient? --------------------------------------------------------------------------------------------


@every_row("value", [math.nan, math.inf])
def test_no_verdict_at_what_is_not_finite(value):
    """A linear map has its Jacobian everywhere, a symmetric one here."""
    state = torch.tensor([[1.0, 2.0], [value, 1.0]])
    assert is_conservative(lambda x: 2 * x, state).tolist() == [True, False]
    asymmetry = jacobian_asymmetry(lambda x: 2 * x, state)
    assert asymmetry[0] == 0 and asymmetry[1].isnan()
    assert not is_conservative(lambda x: x + torch.tensor([0.0, value]), torch.ones(2))


@every_row("size", [1e-30, 1.0, 1e30])
def test_a_turn_is_no_gradient_whatever_its_size(size):
    """‖J − Jᵀ‖/‖J‖ of an antisymmetric J is 2; in float32 the squares of such entries are 0 or infinite."""
    turn = size * torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    torch.testing.assert_close(jacobian_asymmetry(lambda x: x @ turn, torch.ones(2)), torch.tensor(2.0))
    assert not is_conservative(lambda x: x @ turn, torch.ones(2))


# --- bounds ----------------------------------------------------------------------------------------------------------


@every_row("method", ["exact", "radius"])
def test_bounds_of_what_is_nan_are_nan(method):
    """By the constructor, as transforms make values: `create` refuses NaN."""
    weights = Atoms(normal(3, 2), torch.full((3,), torch.nan, dtype=DOUBLE))
    points = Atoms(torch.tensor([[0.0, 0.0], [torch.nan, 1.0]], dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE))
    for atoms in (weights, points):
        memory = HopfieldEnergy(atoms, activations.Identity(), torch.tensor(1.0, dtype=DOUBLE))
        assert bounds.diameter(memory, method=method).isnan()
        assert bounds.lipschitz(memory, method=method).isnan()
        assert theory.energy_range(memory)[1].isnan()


def test_paths_of_unknown_length():
    one, nan, two = 1.0, math.nan, 2.0
    found = path_length(torch.tensor([one, nan, one, nan, one]), torch.tensor([nan, 0.5, two, two, 0.5]))
    assert found.isnan().tolist() == [True, True, False, True, False]
    assert found[2] == torch.inf and found[4] == 2


# --- steps -----------------------------------------------------------------------------------------------------------


def test_tokens_that_attend_to_a_nan_are_nan():
    tokens = torch.nn.functional.normalize(normal(4, 3), dim=-1)
    tokens[0, 0] = torch.nan
    assert ClusteringEnergy.create(1.0).step(tokens).isnan().all()


def test_a_nan_is_within_reach_of_no_pattern():
    energy = LogSumReLU.create(normal(3, 2), scale=0.1)
    assert energy.step(NAN.double()).isnan().all() and energy(NAN.double()).isnan()


def test_the_derivative_of_entmax_at_a_nan_is_nan():
    energy = HopfieldEnergy.create(SparseAtoms.create(normal(4, 2)))
    assert energy.hessian(NAN.double()).isnan().all()


# --- the ends of a range ---------------------------------------------------------------------------------------------


def transformer(normalisation=None) -> TransformerEnergy:
    return TransformerEnergy.create(normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(5, 4), normalisation=normalisation)


def test_a_state_on_the_edge_of_the_range_in_float32_has_an_energy_in_float64():
    """Far tokens lie on the sphere of radius √d to a rounding of float32, one half of them outside."""
    energy = transformer()
    tokens = (1e3 * normal(20, 4, seed=2)).float()
    state = energy.to(torch.float32).normalise(tokens)
    assert ((state.double() - state.double().mean(-1, keepdim=True)).norm(dim=-1) > 2).any()
    widened = energy(state.double())
    assert widened.isfinite()
    torch.testing.assert_close(energy.to(torch.float32)(state).double(), widened, rtol=1e-5, atol=1e-5)
    assert energy.descend(state, steps=1).energies.isfinite().all()
    beyond = state.double() * 1.001
    assert energy(beyond) == torch.inf


@every_row("reference", [activations.SphereProjection.create(2.0), activations.RMSNorm.create(1.5, eps=0.0)])
def test_other_energies_too(reference):
    memory = HopfieldEnergy.create(normal(6, 3), reference=reference)
    state = memory.to(torch.float32).step(normal(30, 3, seed=1).float())
    assert memory(state.double()).isfinite().all()


@every_row("size", [1e-25, 1.0, 1e25])
def test_normalisations_keep_the_direction_of_vectors_of_any_size(size):
    """In float32 the squares of such numbers are 0 or infinite."""
    x = size * torch.tensor([3.0, 4.0])
    sphere = activations.SphereProjection.create(10.0)
    torch.testing.assert_close(sphere(x), torch.tensor([6.0, 8.0]))
    torch.testing.assert_close(sphere.lagrangian(x), torch.tensor(50.0 * size))
    rms = activations.RMSNorm.create(eps=0.0)
    torch.testing.assert_close(rms(x), torch.tensor([3.0, 4.0]) / math.sqrt(12.5))
    layer = activations.LayerNorm.create(eps=0.0)
    torch.testing.assert_close(layer(size * torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sphere.lagrangian(leaf), leaf)
    torch.testing.assert_close(gradient, torch.tensor([6.0, 8.0]))


def test_conjugates_beyond_the_range_of_squares():
    """L*(y) = −s√(r² − ‖y‖²) for RMSNorm of gain g in d dimensions, r = g√d and s² = d·eps."""
    rms = activations.RMSNorm.create(1e25, eps=1e-6)
    y = 1e25 * torch.tensor([0.3, 0.4])
    torch.testing.assert_close(rms.conjugate(y), torch.tensor(-math.sqrt(2e-6) * math.sqrt(2 - 0.25) * 1e25))
    assert activations.RMSNorm.create().conjugate(y) == torch.inf


# --- wrong arguments -------------------------------------------------------------------------------------------------

POWER = torch.tensor([0.0, 1.0], dtype=DOUBLE)


@every_row("dimension", [-1, 0, 1, 2.5, math.nan, True])
def test_a_sphere_has_two_dimensions_at_least(dimension):
    with pytest.raises((TypeError, ValueError), match="dimension must be a whole number"):
        asymptotic_scale(torch.tensor(1e4), POWER, 1.0, dimension)


@every_row("size", [0.0, -1e-5, 1e-300, 1.0])
def test_a_perturbation_has_a_size(size):
    with pytest.raises(ValueError, match=r"size must be finite, at least 1e-10 and at most 0\.001"):
        measured_cumulant_growth(3, 0.1, 1.0, size=size)


@every_row("order", [3, 4, 5, 6])
def test_a_perturbation_of_the_largest_size_is_measured(order):
    """1 + n·step·b^(n−1)/(1 + step·b), to second order in the size."""
    found = measured_cumulant_growth(order, 0.1, 1.0, size=1e-3)
    assert abs(found - (1 + order * 0.1 / 1.1)) < 1e-2


def test_a_scale_whose_square_is_beyond_float64():
    """E w² ≈ c·β^((d−1)/2), c = 2√π·4^(−(d−1)/2)/Γ(d/2): on the sphere in three dimensions it is β."""
    scale = torch.tensor([1e6, 1e200], dtype=DOUBLE)
    found = theory.smoothing_error(1.0, torch.tensor([1.0, 0.0], dtype=DOUBLE), 1.0, 3, scale).sampling
    torch.testing.assert_close(found, scale, rtol=1e-5, atol=0)
    # All is ridge where the kernel's mass is above it: λ e^(−β) is nothing beside ρ.
    assert theory.ridge_multipliers(1, 3, 1e200, 0.1).tolist() == [1.0, 1.0]
