"""B13, B14: spin models by mean field, TAP and adaptive TAP."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from massieu.energy import SpinModel
from massieu.foundation.matrices import eigenvalues
from massieu.measures import Categorical, Gaussian, Spin
from massieu.papers.claims.claim import CLOSED_FORM, Check, all_raise, as_published, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import spin_states
from massieu.papers.claims.registry import claim

_POSTS = "Bal, Deep Implicit Attention (2021)"
_EXACT = 1e-13
"""Relative tolerance of fixed points."""
_WEAK = 0.02
"""Scale of the couplings at which orders are read off, against half of it: remainders are of this size."""
_NO_PART = 1e-3
"""Share of the second order that stands for none: (0.02)³ times the ratio of coefficients, of the order of 10."""

_SHORT = 0.15
"""How far below an order that a sum of two powers may seem to lie."""
_ROUNDING = 1e-12

Means = Callable[[float], Tensor]


def _couplings(normal: Normal, number: int, size: int = 1) -> Tensor:
    """Symmetric, without a diagonal, of spectral norm 1."""
    drawn = normal(number, number, size, size)
    drawn = drawn + drawn.permute(1, 0, 3, 2)
    drawn = drawn * (1 - torch.eye(number, dtype=drawn.dtype))[:, :, None, None]
    return drawn / torch.linalg.matrix_norm(drawn.transpose(1, 2).reshape(number * size, -1), 2)


def _enumerated(coupling: Tensor, field: Tensor, half: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Means, covariances and log Z of p ∝ exp(half·Σ J SS + Σ x S), relative to no couplings."""
    states = spin_states(len(field))
    alone = states @ field
    level = half * ((states @ coupling) * states).sum(-1) + alone
    p = torch.softmax(level, 0)
    mean = p @ states
    return (
        mean,
        states.T @ (p.unsqueeze(-1) * states) - torch.outer(mean, mean),
        level.logsumexp(0) - alone.logsumexp(0),
    )


def _order(name: str, error: Callable[[float], Tensor], least: int) -> Check:
    """Halving weak couplings divides the error by 2 to its order."""
    ratio = error(_WEAK).norm() / error(_WEAK / 2).norm()
    return at_least(f"{name}: order of the error", torch.log2(ratio), least - _SHORT)


def _no_second_order(name: str, error: Callable[[float], Tensor], scale: Tensor) -> Check:
    """The error's part of second order in the couplings vanishes, beside that of mean field, a sum of positive terms.

    The part of third order is one number of either sign: where it happens to be small, the error falls at no rate yet.
    Richardson's extrapolation takes it away with the fourth; what it leaves is of third order beside the second.
    """
    first, second, third = (error(size) / size**2 for size in (_WEAK, _WEAK / 2, _WEAK / 4))
    left = first / 3 - 2 * second + 8 / 3 * third
    return at_most(f"{name}: the error's part of second order, by mean field's", (left / scale).abs(), _NO_PART)


# --- B13 -------------------------------------------------------------------------------------------------------------


@claim(
    "B13",
    title="Ising mean field, TAP, adaptive TAP",
    statement="For p ∝ exp(½ΣJ_ijS_iS_j + Σx_iS_i)Πρ_i the error of the means is of second order in J by mean field "
    "and of third order by TAP, whose field has the term −m_iΣJ_ij²(1 − m_j²) for ±1. It is of third order by "
    "adaptive TAP too, in which V_i = Λ_i − 1/[(Λ − J)⁻¹]_ii with Λ_i = V_i + 1/χ_ii. Without fields the same "
    "orders hold for the covariance, which in adaptive TAP is (Λ − J)⁻¹. The derivatives of adaptive TAP's log Z "
    "are its moments.",
    source=f"{_POSTS}; Opper and Winther, Phys. Rev. E 64, 056131 (2001)",
    status="reconstructed",
    published="E = ΣJ_ijS_iS_j + Σx_iS_i, with m_i = tanh(ΣJ_ijm_j + x_i) as its mean field.",
    standing="ambiguous",
    corrected="p ∝ e^{−E} needs the minus sign, and a sum over both orders of a pair needs the factor ½: as "
    "written, the field would be −2ΣJ_ijm_j − x_i.",
)
def spin_approximations(spins: int = 8, seed: int = 0) -> Iterator[Check]:
    check_at_least(3, spins=spins)
    normal = normal_draws(seed)
    coupling = _couplings(normal, spins)
    field = 0.5 * normal(spins)
    yield from _textbook(0.5 * coupling[:, :, 0, 0], field)

    def error(method: str, scale: float, what: int, field: Tensor = field) -> Tensor:
        model = SpinModel.create(Spin.create(field), scale * coupling)
        found = getattr(model, method)(rtol=_EXACT)[what]
        wanted = _enumerated(scale * coupling[:, :, 0, 0], field)[what]
        return found.reshape(wanted.shape) - wanted

    fair = torch.zeros_like(field)
    second_order = error("mean_field", _WEAK / 4, 2) / (_WEAK / 4) ** 2
    for method, order in (("mean_field", 2), ("tap", 3), ("adaptive_tap", 3)):
        name = method.replace("_", " ")
        yield _order(f"{name}, means", lambda s, method=method: error(method, s, 0), order)
        if method == "mean_field":
            yield _order(f"{name}, log Z", lambda s: error("mean_field", s, 2), order)
        else:
            yield _no_second_order(f"{name}, log Z", lambda s, method=method: error(method, s, 2), second_order)
        yield _order(f"{name}, covariances without fields", lambda s, method=method: error(method, s, 1, fair), order)
    yield from _other_sites(normal)
    yield at_most("mean field: log Z − the exact one", error("mean_field", 0.5, 2), _ROUNDING)
    yield from _derivatives(0.5 * coupling, field)

    def as_written(sign: float) -> Means:
        def difference(scale: float) -> Tensor:
            model = SpinModel.create(Spin.create(field), scale * coupling)
            exact = _enumerated(sign * scale * coupling[:, :, 0, 0], sign * field, half=1.0)[0]
            return model.mean_field(rtol=_EXACT).mean.flatten() - exact

        return difference

    yield as_published(_order("mean field of p ∝ e^{−E}, E as written", as_written(-1.0), 2))
    yield as_published(_order("mean field of p ∝ e^E, E as written", as_written(1.0), 2))


def _textbook(coupling: Tensor, field: Tensor) -> Iterator[Check]:
    """The fixed points satisfy the equations as they are printed."""
    model = SpinModel.create(Spin.create(field), coupling)
    mean = model.mean_field(rtol=_EXACT).mean.flatten()
    yield close("mean field: m and tanh(Jm + x)", mean, torch.tanh(coupling @ mean + field))
    mean = model.tap(rtol=_EXACT).mean.flatten()
    onsager = mean * (coupling.square() @ (1 - mean.square()))
    yield close("TAP: m and tanh(Jm + x − mΣJ²(1 − m²))", mean, torch.tanh(coupling @ mean + field - onsager))
    found = model.adaptive_tap(rtol=_EXACT)
    assert found.solution is not None
    mean = found.mean.flatten()
    curvature = found.solution.value[:, 0, 1]
    variance = 1 - mean.square()
    response = torch.linalg.inv(torch.diag(curvature + 1 / variance) - coupling)
    tilted = torch.tanh(coupling @ mean + field - curvature * mean)
    yield close("adaptive TAP: m and tanh(Jm + x − Vm)", mean, tilted)
    yield close(
        "adaptive TAP: V and Λ − 1/[(Λ − J)⁻¹]_ii", curvature, curvature + 1 / variance - 1 / response.diagonal()
    )
    yield close("adaptive TAP: covariance and (Λ − J)⁻¹", found.covariance.reshape(response.shape), response)
    yield at_least("adaptive TAP: least eigenvalue of (Λ − J)⁻¹", torch.linalg.eigvalsh(response)[0], 0.0)


def _other_sites(normal: Normal) -> Iterator[Check]:
    """Potts sites of three states, coupled by matrices."""
    coupling = _couplings(normal, 4, 3)
    site = Categorical.create(logits=0.5 * normal(4, 3))

    def error(method: str, scale: float) -> Tensor:
        model = SpinModel.create(site, scale * coupling)
        return getattr(model, method)(rtol=_EXACT).mean - model.exact().mean

    for method, order in (("mean_field", 2), ("tap", 3), ("adaptive_tap", 3)):
        name = method.replace("_", " ")
        yield _order(f"Potts sites, {name}, means", lambda s, method=method: error(method, s), order)


def _derivatives(coupling: Tensor, field: Tensor) -> Iterator[Check]:
    """Adaptive TAP's log Z is stationary in means and V."""

    def level(coupling: Tensor, field: Tensor) -> Tensor:
        return SpinModel.create(Spin.create(field), coupling).adaptive_tap(rtol=_EXACT).log_partition

    to_coupling, to_field = torch.func.grad(level, (0, 1))(coupling, field)
    found = SpinModel.create(Spin.create(field), coupling).adaptive_tap(rtol=_EXACT)
    mean = found.mean.flatten()
    number = len(field)
    yield close("adaptive TAP: ∂log Z/∂x and m − tanh x", to_field, mean - torch.tanh(field))
    second = found.covariance.reshape(number, number) + torch.outer(mean, mean)
    apart = 1 - torch.eye(number, dtype=mean.dtype)
    slope = to_coupling.reshape(number, number)
    yield close("adaptive TAP: 2∂log Z/∂J_ij and χ_ij + m_im_j", 2 * apart * slope, apart * second)


# --- B14 -------------------------------------------------------------------------------------------------------------


@claim(
    "B14",
    title="Vector spins with Gaussian prior",
    statement="For Gaussian sites with Σ⁻¹ − J positive definite, the means are (Σ⁻¹ − J)⁻¹X. Mean field, TAP and "
    "adaptive TAP all give them, since the Onsager term cancels for every V. Adaptive TAP, with V_i = Σ_i⁻¹ − "
    "(G_ii)⁻¹, also gives the covariance G = (Σ⁻¹ − J)⁻¹ and log Z, of which mean field lacks −½ log det(I − ΣJ).",
    source=f"{_POSTS}; the exact solution is derived",
    status="reconstructed",
    published="S_i = ΣJ_ijS_j − f(S_i) + X_i with a feed-forward network f(S_i) ≈ V_iS_i in the place of the Onsager term.",
    standing="ambiguous",
    corrected="With the term, the variance of a site becomes (Σ_i⁻¹ − V_i)⁻¹, and the two cancel. The term by "
    "itself moves the means away, so that a correction can matter only for sites that are not Gaussian.",
)
def gaussian_spins(spins: int = 5, size: int = 2, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, spins=spins)
    normal = normal_draws(seed)
    factor = normal(spins, size, size)
    pull = normal(spins, size)
    covariance = factor @ factor.mT + 0.5 * torch.eye(size, dtype=factor.dtype)
    block = torch.block_diag(*covariance)
    coupling = 0.6 * _couplings(normal, spins, size) / torch.linalg.matrix_norm(block, 2)
    matrix = coupling.transpose(1, 2).reshape(block.shape)
    inverse = torch.linalg.inv(block)
    location = (covariance @ pull.unsqueeze(-1)).squeeze(-1)
    response = torch.linalg.inv(inverse - matrix)
    mean = (response @ pull.flatten()).reshape(pull.shape)

    model = SpinModel.create(Gaussian.create(location, covariance), coupling)
    fluctuation = -0.5 * torch.logdet(torch.eye(len(block), dtype=block.dtype) - block @ matrix)
    log_z = 0.5 * (pull * (mean - location)).sum() + fluctuation
    results = {name: getattr(model, name)(rtol=_EXACT) for name in ("mean_field", "tap")}
    # For Gaussian sites one undamped step is the solution.
    results["adaptive_tap"] = model.adaptive_tap(damping=1.0)
    for name, found in results.items():
        # The others stop within 1e-12 of a fixed point.
        tolerance = _ROUNDING if name == "adaptive_tap" else CLOSED_FORM
        yield close(f"{name.replace('_', ' ')}: means and (Σ⁻¹ − J)⁻¹X", found.mean, mean, tolerance)
        found_response = found.covariance.reshape(response.shape)
        yield close(f"{name.replace('_', ' ')}: covariance and (Σ⁻¹ − J)⁻¹", found_response, response, _ROUNDING)
    adaptive = results["adaptive_tap"]
    assert adaptive.solution is not None
    own = torch.stack([response[size * i :, size * i :][:size, :size] for i in range(spins)])
    curvature = torch.linalg.inv(covariance) - torch.linalg.inv(own)
    yield close("adaptive TAP: V and Σ⁻¹ − (G_ii)⁻¹", adaptive.solution.value[..., 1:], curvature)
    yield close("adaptive TAP: log Z and the Gaussian integral", adaptive.log_partition, log_z, _ROUNDING)
    lacking = log_z - results["mean_field"].log_partition
    yield close("mean field: what log Z lacks and −½ log det(I − ΣJ)", lacking, fluctuation, _ROUNDING)

    def means(location: Tensor) -> Tensor:
        return SpinModel.create(Gaussian.create(location, covariance), coupling).adaptive_tap(rtol=_EXACT).mean

    slope = torch.func.jacrev(means)(location).reshape(block.shape) @ block
    yield close("adaptive TAP: ∂m/∂X and (Σ⁻¹ − J)⁻¹", slope, response)
    yield from _cancellation(covariance, matrix, pull, mean, curvature)
    site = Gaussian.create(location, covariance)
    largest = eigenvalues(block @ matrix).real.amax()
    SpinModel.create(site, 0.99 / largest * coupling)
    yield all_raise("couplings beyond Σ⁻¹", ValueError, lambda: SpinModel.create(site, 1.01 / largest * coupling))


def _cancellation(covariance: Tensor, matrix: Tensor, pull: Tensor, mean: Tensor, curvature: Tensor) -> Iterator[Check]:
    """The exact means in the equation with and without the change of variance."""
    onsager = (curvature @ mean.unsqueeze(-1)).squeeze(-1)
    field = (matrix @ mean.flatten()).reshape(mean.shape) - onsager + pull
    changed = torch.linalg.solve(torch.linalg.inv(covariance) - curvature, field.unsqueeze(-1)).squeeze(-1)
    yield close("the exact means and (Σ⁻¹ − V)⁻¹(Jm − Vm + X)", changed, mean)
    alone = (covariance @ field.unsqueeze(-1)).squeeze(-1)
    yield as_published(close("the exact means and Σ(Jm − Vm + X)", alone, mean))
