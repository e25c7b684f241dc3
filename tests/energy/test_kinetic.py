"""Kinetic spins against SciPy's Bessel functions, enumeration, quadrature and automatic differentiation (B16, N31)."""

import math

import numpy as np
import pytest
import torch
from scipy.special import ive
from tests.support.derivatives import check_derivatives
from tests.support.rows import some_slow

from massieu.energy import KineticSpins
from massieu.errors import ConvergenceError
from massieu.measures import Sphere
from massieu.solve import Picard, Status


def spins(number=4, size=8, strength=0.3, seed=0, batch=(), **options):
    generator = torch.Generator().manual_seed(seed)
    drive = torch.randn(*batch, number, size, generator=generator, dtype=torch.float64)
    coupling = strength * torch.randn(*batch, number, number, generator=generator, dtype=torch.float64)
    return KineticSpins.create(drive, coupling, **({"scale": 1.3} | options))


def states(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(model.drive.shape, generator=generator, dtype=torch.float64)


def test_both_normalisers_at_theorys_numbers():
    size = 512
    radius = math.sqrt(size / 2 - 1)
    field = torch.zeros(1, size).double()
    field[0, 0] = 1.3 * radius
    means = [
        KineticSpins.create(field, torch.zeros(1, 1).double(), exact=exact).mean(field)[0, 0].item() / radius
        for exact in (True, False)
    ]
    kappa = 1.3 * radius**2
    assert means[0] == pytest.approx(ive(size / 2, kappa) / ive(size / 2 - 1, kappa), rel=1e-12)
    assert [pytest.approx(number, abs=1e-4) for number in means] == [0.4914, 0.4924]


@pytest.mark.parametrize("exact", [True, False])
def test_the_covariance_is_the_jacobian_and_the_state_the_inverse(exact):
    model = spins(exact=exact)
    state = states(model)
    jacobian = torch.func.jacrev(model.mean)(state)
    for i in range(4):
        torch.testing.assert_close(jacobian[i, :, i], 1.3 * model.covariance(state)[i], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.state(model.mean(state)), state, rtol=1e-9, atol=1e-10)
    assert bool((torch.linalg.eigvalsh(model.covariance(state)) <= 0.5).all())
    if exact:
        sphere = Sphere.create(torch.tensor(model.radius, dtype=torch.float64), dim=8)
        torch.testing.assert_close(model.covariance(state), sphere.fisher(1.3 * state), rtol=1e-11, atol=1e-13)
    else:
        gamma = (1 + 1.3**2 * state.square().sum(-1) / model.radius**2).sqrt()
        wanted = torch.stack([1.3 / (gamma * (1 + gamma)), *[1.3 / (1 + gamma)] * 7], -1)
        eigenvalues = torch.linalg.eigvalsh(1.3 * model.covariance(state))
        torch.testing.assert_close(eigenvalues, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.medium
@some_slow("exact", [False, True], 1)
def test_derivatives_exist_at_zero(exact):
    model = spins(exact=exact)
    zero = torch.zeros(4, 8).double().requires_grad_()
    value = model.step(zero, "second").square().sum()
    (gradient,) = torch.autograd.grad(value, zero)
    assert bool(gradient.isfinite().all())


def second_derivative(model, state, contracted):
    """φ''(θ_i)[S_i], by automatic differentiation of φ, one spin at a time."""
    alone = lambda theta: model.mean(theta.expand(model.drive.shape))[0]  # noqa: E731
    hessian = torch.stack([torch.func.jacfwd(torch.func.jacrev(alone))(theta) for theta in state])
    return torch.einsum("iabc,ibc->ia", hessian, contracted)


@pytest.mark.medium
@some_slow("exact", [False, True], 1)
def test_the_echo_is_half_the_second_derivative_by_the_first(exact):
    model = spins(2, 5, exact=exact)
    before = states(model)
    state = model.step(before, "second")
    rest = model.field(before) - state
    covariance = model.covariance(before)
    contracted = torch.einsum("ij,jab->iab", model.coupling.square(), covariance)
    contracted = contracted + rest.unsqueeze(-1) * rest.unsqueeze(-2)
    if not exact:
        # Of many components, the trace that a fixed length gives: R² − ‖m‖² (it differs by 1/γ).
        loose = model.radius**2 - model.mean(before).square().sum(-1)
        missing = loose - covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        gamma = (1 + 1.3**2 * before.square().sum(-1) / model.radius**2).sqrt()
        torch.testing.assert_close(missing, -1 / gamma, rtol=1e-9, atol=1e-12)
    second = second_derivative(model, state, contracted)
    if not exact:
        slope = torch.func.jvp(lambda t: model._radial(t).value, (state,), (state,))[1]
        slope = slope / (2 * state.square().sum(-1, keepdim=True))
        second = second + 2 * slope * (model.coupling.square() @ missing).unsqueeze(-1) * state
    jacobian = 1.3 * model.covariance(state)
    wanted = 0.5 * torch.linalg.solve(jacobian, second)
    torch.testing.assert_close(state - model.field(before), wanted, rtol=1e-8, atol=1e-9)


def by_angle(drive, strength, before, size, scale):
    """E φ(x + Jσ) along the axis, σ in a field along it too: one integral over σ's cosine, with SciPy's functions."""
    radius = math.sqrt(size / 2 - 1)
    nodes, weights = np.polynomial.legendre.leggauss(100)
    log_p = (size - 3) / 2 * np.log1p(-(nodes**2)) + scale * radius * before * nodes
    p = weights * np.exp(log_p - log_p.max())
    p = p / p.sum()
    along = drive + strength * radius * nodes
    length = np.sqrt(along**2 + strength**2 * radius**2 * (1 - nodes**2))
    kappa = scale * radius * length
    mean = radius * ive(size / 2, kappa) / ive(size / 2 - 1, kappa) * along / length
    return float(p @ mean)


@pytest.mark.medium
def test_one_step_from_independent_vectors_to_second_and_third_order():
    size, scale, drive, before = 6, 1.4, 0.9, 1.7
    errors = {"first": [], "second": []}
    for strength in (0.4, 0.2, 0.1):
        coupling = torch.tensor([[0.0, strength], [0.0, 0.0]]).double()
        fields = torch.zeros(2, size).double()
        fields[0, 0], fields[1, 0] = drive, before
        model = KineticSpins.create(fields, coupling, scale=scale, exact=True)
        wanted = by_angle(drive, strength, before, size, scale)
        for order, differences in errors.items():
            mean = model.mean(model.step(fields, order))[0, 0].item()
            differences.append(abs(mean - wanted))
    slopes = {order: np.diff(np.log2(differences)) for order, differences in errors.items()}
    assert np.all(np.abs(slopes["first"] + 2) < 0.2)
    assert np.all(slopes["second"] < -2.7)


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_contracts_by_its_constant(exact):
    for seed in range(5):
        model = spins(6, 4, 0.2, seed, batch=(50,), scale=torch.linspace(0.1, 3, 50).double(), exact=exact)
        first, second = states(model, 2 * seed), 0.3 * states(model, 2 * seed + 1)
        before = (first - second).norm(dim=-1).amax(-1)
        after = (model.step(first) - model.step(second)).norm(dim=-1).amax(-1)
        assert bool((after <= model.lipschitz * before).all())


def test_couplings_of_a_softmax_contract_below_two():
    coupling = torch.softmax(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double(), -1)
    model = KineticSpins.create(torch.ones(5, 4).double(), coupling, scale=1.9)
    assert model.lipschitz.item() == pytest.approx(0.95)


@pytest.mark.medium
@some_slow(("order", "exact"), [("first", False), ("second", True), ("first", True), ("second", False)], 1)
def test_stationary_states_do_not_move_and_their_derivatives(order, exact):
    model = spins(2, 4, 0.3, exact=exact)
    solution = model.stationary(order)
    assert int(solution.status) == Status.CONVERGED
    torch.testing.assert_close(model.step(solution.value, order), solution.value, rtol=0, atol=1e-8)

    def means(drive, coupling, scale):
        given = KineticSpins.create(drive, coupling, scale=scale, exact=exact)
        return given.mean(given.stationary(order).value)

    given = model.drive, model.coupling, model.scale
    check_derivatives(means, given, second=False, eps=1e-4, rtol=1e-4)

    def step(drive, coupling):
        return KineticSpins.create(drive, coupling, exact=exact).step(model.drive, order)

    check_derivatives(step, given[:2], second=False)


@pytest.mark.medium
def test_second_derivatives_of_the_stationary_means():
    model = spins(2, 3, 0.3)

    def means(drive, coupling):
        given = KineticSpins.create(drive, coupling)
        return given.mean(given.stationary("second").value)

    check_derivatives(means, (model.drive, model.coupling), first=False, eps=1e-4, rtol=1e-3)


def test_entropy_production_is_its_sum_and_zero_for_symmetric_couplings():
    for exact in (True, False):
        model = spins(batch=(2,), exact=exact)
        state = states(model)
        covariance = model.covariance(state)
        asymmetry = (model.coupling - model.coupling.mT).square()
        wanted = 0.5 * 1.3**2 * torch.einsum("bij,biac,bjca->b", asymmetry, covariance, covariance)
        torch.testing.assert_close(model.entropy_production(state), wanted, rtol=1e-12, atol=0)
        assert bool((wanted > 0).all())
        even = KineticSpins.create(model.drive, model.coupling + model.coupling.mT, exact=exact)
        assert not bool(even.entropy_production(state).any())


def test_batches_by_vmap_and_half_precision():
    model = spins(3, 6, batch=(4,))

    def stationary(drive, coupling):
        given = KineticSpins.create(drive, coupling, scale=1.3)
        return given.mean(given.stationary("second").value)

    solutions = torch.func.vmap(stationary)(model.drive, model.coupling)
    wanted = model.mean(model.stationary("second").value)
    torch.testing.assert_close(solutions, wanted, rtol=0, atol=1e-9)
    half = stationary(model.drive[0].bfloat16(), model.coupling[0].bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), wanted[0], rtol=0.05, atol=0.05)


def test_no_fixed_point_is_told():
    ring = torch.tensor([[0.0, 40.0], [-40.0, 0.0]]).double()  # the spins turn for ever
    model = KineticSpins.create(0.1 * torch.ones(2, 4).double(), ring, scale=4.0)
    solution = model.stationary(max_steps=30, method=Picard(), throw=False)
    assert int(solution.status) != Status.CONVERGED
    with pytest.raises(ConvergenceError):
        model.stationary(max_steps=30, method=Picard())


def test_wrong_inputs():
    drive, coupling = torch.zeros(3, 4), torch.zeros(3, 3)
    for create, arguments, options, message in (
        (KineticSpins.create, (drive, torch.zeros(2, 2)), {}, r"got \(3, 4\) and \(2, 2\)"),
        (KineticSpins.create, (torch.zeros(3, 2), coupling), {}, "D at least 3"),
        (
            KineticSpins.create,
            (drive, coupling.long()),
            {},
            "coupling must be a floating-point tensor, got a tensor of torch.int64",
        ),
        (KineticSpins.create, (drive, coupling), {"scale": 0.0}, "positive and finite, got 0"),
        (KineticSpins.create, (drive, coupling), {"scale": torch.ones(2)}, r"\(2,\) does not broadcast"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            create(*arguments, **options)
    model = KineticSpins.create(drive, coupling)
    with pytest.raises(ValueError, match="'first' or 'second', got 'third'"):
        model.step(drive, "third")
    with pytest.raises(ValueError, match=r"drive's shape \(3, 4\), got \(3,\)"):
        model.stationary(start=torch.zeros(3))
    with pytest.raises(ValueError, match="shorter than the radius 1, got a length of 2"):
        model.state(torch.ones(3, 4))
