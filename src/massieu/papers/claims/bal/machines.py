"""B1: the energy of a Boltzmann machine of two layers, and when it has a normaliser."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy import BoltzmannMachine
from massieu.measures import Bernoulli, Gaussian, Poisson, Spin
from massieu.papers.claims.claim import BAL, QUADRATURE, Check, all_raise, as_published, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import log_integral, quadrature, spin_states
from massieu.papers.claims.registry import claim


@claim(
    "B1",
    title="Energy of a restricted Boltzmann machine",
    statement="A restricted Boltzmann machine has E(v, h) = −Σ aᵢ(vᵢ) − Σ b_μ(h_μ) − Σ W_{iμ}vᵢh_μ, with aᵢ(v) = "
    "−v²/(2σᵢ²) + aᵢv for Gaussian units. Two Gaussian layers have a normaliser if and only if diag(σ_v⁻²) − W "
    "diag(σ_h²) Wᵀ is positive definite.",
    source=f"{BAL}, §2.1",
    status="quoted",
    published="The potential of Gaussian units is aᵢ(v) = +v²/(2σᵢ²).",
    corrected="The sign: as printed, e^{−E} grows like e^{v²/(2σ²)} and cannot be normalised. The condition for two "
    "Gaussian layers is missing.",
)
def energy_of_a_machine(machines: int = 40, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, machines=machines)
    normal = normal_draws(seed)
    yield from _bits_and_spins(normal)
    yield from _gaussian_and_bits(normal)
    yield from _two_gaussian_layers(normal, machines)
    gaussian = Gaussian.create(normal(2), normal(2).exp())
    poisson = Poisson.create(normal(2).exp())
    weight = 1e-3 * normal(2, 2)
    yield all_raise(
        "Poisson hidden and Gaussian visible units: no machine",
        ValueError,
        lambda: BoltzmannMachine.create(gaussian, poisson, weight),
    )


def _bits_and_spins(normal: Normal) -> Iterator[Check]:
    """E(v, h), E(v) and log Z of four bits and three spins, by a sum over every joint state."""
    a = normal(4)
    b = normal(3)
    weight = normal(4, 3)
    machine = BoltzmannMachine.create(Bernoulli.create(torch.sigmoid(a)), Spin.create(b), weight)
    # All 16·8 pairs of a visible and a hidden state, (128, 4) and (128, 3).
    visible = (0.5 * (1 + spin_states(4))).repeat_interleave(8, 0)
    hidden = spin_states(3).repeat(16, 1)
    formula = -(visible @ a) - hidden @ b - (visible @ weight * hidden).sum(-1)
    constants = a.exp().log1p().sum() + (2 * b.cosh()).log().sum()
    energy = machine.energy(visible, hidden)
    yield close("bits and spins: E(v, h) and its formula, constants added", energy, formula + constants)
    summed = -torch.logsumexp(-energy.reshape(16, 8), 1)
    yield close("bits and spins: E(v) and E(v, h) summed over h", machine.effective_energy(visible[::8]), summed)
    yield close("bits and spins: log Z and the sum", machine.log_partition(), torch.logsumexp(-energy, 0))


def _gaussian_and_bits(normal: Normal) -> Iterator[Check]:
    """E(v, h) and log Z of one Gaussian unit, over which can be integrated, and the sign of its potential."""
    a = normal(1)
    variance = normal(1).mul(0.3).exp()
    b = normal(2)
    weight = normal(1, 2)
    machine = BoltzmannMachine.create(
        Gaussian.create(a * variance, variance), Bernoulli.create(torch.sigmoid(b)), weight
    )
    hidden = 0.5 * (1 + spin_states(2))

    def energy(v: Float[Tensor, "nodes"], sign: float) -> Float[Tensor, "4 nodes"]:
        """a(v) = sign·v²/(2σ²) + a·v."""
        potential = sign * 0.5 * v.square() / variance + a * v
        return -potential - (hidden @ b).unsqueeze(-1) - hidden @ weight.T * v

    v = 3 * normal(50)
    # Every hidden state beside every v, (4, 50, units).
    library = machine.energy(v.unsqueeze(-1).expand(4, -1, 1), hidden.unsqueeze(1).expand(-1, 50, -1))
    constants = 0.5 * (2 * math.pi * variance).log() + 0.5 * a.square() * variance + b.exp().log1p().sum()
    yield close("Gaussian and bits: E(v, h) and its formula", library, energy(v, -1.0) + constants)
    # Twelve deviations about every mean that a hidden state may shift v to.
    deviation = variance.sqrt().item()
    reach = 12 * deviation + (a * variance).abs().item() + weight.abs().sum().item() * variance.item()

    def log_mass(sign: float, reach: float) -> Tensor:
        return log_integral(lambda x: torch.logsumexp(-energy(x, sign), 0), -reach, reach)

    whole = log_mass(-1.0, reach)
    yield close("Gaussian and bits: log Z and ∫ e^(−E)", machine.log_partition() + constants, whole, QUADRATURE)
    growth = log_mass(-1.0, 2 * reach) - whole
    yield at_most("a(v) = −v²/2σ²: log mass within 2R over that within R", growth, QUADRATURE)
    growth = log_mass(1.0, 2 * reach) - log_mass(1.0, reach)
    yield as_published(at_most("a(v) = +v²/2σ²: log mass within 2R over that within R", growth, QUADRATURE))


def _two_gaussian_layers(normal: Normal, machines: int) -> Iterator[Check]:
    """A normaliser exists if and only if diag(σ_v⁻²) − W diag(σ_h²) Wᵀ ≻ 0: every other machine has one."""
    against_joint = 0
    against_norm = 0
    improper = []
    for index in range(machines):
        is_below_one = bool(index % 2)
        visible_variance = normal(3).mul(0.5).exp()
        hidden_variance = normal(4).mul(0.5).exp()
        norm = 0.05 + 0.9 * torch.sigmoid(normal(1))
        if not is_below_one:
            norm = 1 / norm
        weight = normal(3, 4)
        # The condition says that σ_v W σ_h has a spectral norm below 1.
        factor = visible_variance.sqrt().unsqueeze(-1) * weight * hidden_variance.sqrt()
        weight = weight * norm / torch.linalg.matrix_norm(factor, 2)
        schur = (1 / visible_variance).diag() - weight * hidden_variance @ weight.T
        is_proper = _is_positive_definite(schur)
        against_joint += is_proper != _is_positive_definite(_joint_precision(visible_variance, hidden_variance, weight))
        against_norm += is_proper != is_below_one
        create = partial(BoltzmannMachine.create, _centred(visible_variance), _centred(hidden_variance), weight)
        if is_proper:
            create()
        else:
            improper.append(create)
    yield at_most("two Gaussian layers: Schur complement and joint precision differ in sign", float(against_joint), 0.0)
    yield at_most("the same for the norm of σ_v W σ_h and 1", float(against_norm), 0.0)
    yield all_raise("two Gaussian layers without a normaliser", ValueError, *improper)
    yield from _pair_of_gaussian_units(normal)


def _joint_precision(
    visible_variance: Float[Tensor, "V"], hidden_variance: Float[Tensor, "H"], weight: Float[Tensor, "V H"]
) -> Float[Tensor, "V+H V+H"]:
    """Of v and h together: twice the quadratic form in E(v, h)."""
    visible_rows = torch.cat([(1 / visible_variance).diag(), -weight], 1)
    hidden_rows = torch.cat([-weight.T, (1 / hidden_variance).diag()], 1)
    return torch.cat([visible_rows, hidden_rows])


def _is_positive_definite(matrix: Float[Tensor, "d d"]) -> bool:
    return bool((torch.linalg.eigvalsh(matrix) > 0).all())


def _pair_of_gaussian_units(normal: Normal) -> Iterator[Check]:
    """log ∫ e^{−E} over the plane for σ_v W σ_h = 0.6."""
    visible_variance, hidden_variance = normal(2, 1).mul(0.3).exp()
    weight = 0.6 / (visible_variance * hidden_variance).sqrt()
    machine = BoltzmannMachine.create(_centred(visible_variance), _centred(hidden_variance), weight.unsqueeze(0))
    points, log_weight = quadrature(-30.0, 30.0, panels=24)
    grid = torch.cartesian_prod(points, points)
    energy = machine.energy(grid[:, :1], grid[:, 1:]).reshape(len(points), -1)
    mass = torch.logsumexp(log_weight.unsqueeze(-1) + log_weight - energy, (0, 1))
    yield close("a pair of Gaussian units: log ∫ e^(−E) and −½ log(1 − 0.6²)", mass, -0.5 * math.log(0.64), QUADRATURE)


def _centred(variance: Float[Tensor, "d"]) -> Gaussian:
    return Gaussian.create(torch.zeros_like(variance), variance)
