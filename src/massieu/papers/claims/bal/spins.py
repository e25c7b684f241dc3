"""B13, B14: spin models by mean field, TAP and adaptive TAP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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

_METHOD_ORDERS = {"mean_field": 2, "tap": 3, "adaptive_tap": 3}
"""The order in the couplings of a method's error."""

_Error = Callable[[float], Tensor]
"""The error of an approximation, by the scale of the couplings."""


def _couplings(normal: Normal, number: int, size: int = 1) -> Tensor:
    """Symmetric, without a diagonal, of spectral norm 1."""
    coupling = normal(number, number, size, size)
    coupling = coupling + coupling.permute(1, 0, 3, 2)
    coupling = coupling * (1 - torch.eye(number, dtype=coupling.dtype))[:, :, None, None]
    # (i, j, a, b) as a matrix of (i, a) by (j, b).
    matrix = coupling.transpose(1, 2).reshape(number * size, -1)
    return coupling / torch.linalg.matrix_norm(matrix, 2)


@dataclass(frozen=True)
class _Moments:
    """What a law of spins is compared in.

    Attributes:
        mean: Of each spin.
        covariance: Of each pair.
        log_partition: Relative to no couplings.
    """

    mean: Tensor
    covariance: Tensor
    log_partition: Tensor


def _enumerated(coupling: Tensor, field: Tensor, prefactor: float = 0.5) -> _Moments:
    """Moments of p ∝ exp(prefactor·Σ J SS + Σ x S), by a sum over all states."""
    states = spin_states(len(field))
    field_part = states @ field
    level = prefactor * ((states @ coupling) * states).sum(-1) + field_part
    p = torch.softmax(level, 0)
    mean = p @ states
    covariance = states.T @ (p.unsqueeze(-1) * states) - torch.outer(mean, mean)
    return _Moments(mean, covariance, level.logsumexp(0) - field_part.logsumexp(0))


def _order(name: str, error: _Error, least: int) -> Check:
    """Halving weak couplings divides the error by 2 to its order."""
    ratio = error(_WEAK).norm() / error(_WEAK / 2).norm()
    return at_least(f"{name}: order of the error", torch.log2(ratio), least - _SHORT)


def _no_second_order(name: str, error: _Error, scale: Tensor) -> Check:
    """The error's part of second order in the couplings vanishes, beside that of mean field, a sum of positive terms.

    The part of third order is one number of either sign: where it happens to be small, the error falls at no rate yet.
    Richardson's extrapolation takes it away with the fourth; what it leaves is of third order beside the second.
    """

    def scaled_error(size: float) -> Tensor:
        return error(size) / size**2

    second_order = scaled_error(_WEAK) / 3 - 2 * scaled_error(_WEAK / 2) + 8 / 3 * scaled_error(_WEAK / 4)
    return at_most(f"{name}: the error's part of second order, by mean field's", (second_order / scale).abs(), _NO_PART)


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
    yield from _orders_of_errors(coupling, field)
    yield from _other_sites(normal)
    log_z_error = _error_of("mean_field", "log_partition", coupling, field)
    yield at_most("mean field: log Z − the exact one", log_z_error(0.5), _ROUNDING)
    yield from _derivatives(0.5 * coupling, field)

    def error_as_written(sign: float) -> _Error:
        def error(scale: float) -> Tensor:
            model = SpinModel.create(Spin.create(field), scale * coupling)
            exact = _enumerated(sign * scale * coupling[:, :, 0, 0], sign * field, prefactor=1.0).mean
            return model.mean_field(rtol=_EXACT).mean.flatten() - exact

        return error

    yield as_published(_order("mean field of p ∝ e^{−E}, E as written", error_as_written(-1.0), 2))
    yield as_published(_order("mean field of p ∝ e^E, E as written", error_as_written(1.0), 2))


def _error_of(method: str, quantity: str, coupling: Tensor, field: Tensor) -> _Error:
    """How far a method's mean, covariance or log_partition lies from the enumerated one."""

    def error(scale: float) -> Tensor:
        model = SpinModel.create(Spin.create(field), scale * coupling)
        approximation = getattr(getattr(model, method)(rtol=_EXACT), quantity)
        exact = getattr(_enumerated(scale * coupling[:, :, 0, 0], field), quantity)
        return approximation.reshape(exact.shape) - exact

    return error


def _orders_of_errors(coupling: Tensor, field: Tensor) -> Iterator[Check]:
    """Errors are of second order in J by mean field, of third by TAP and adaptive TAP."""
    no_field = torch.zeros_like(field)
    mean_field_log_z = _error_of("mean_field", "log_partition", coupling, field)
    second_order = mean_field_log_z(_WEAK / 4) / (_WEAK / 4) ** 2
    for method, order in _METHOD_ORDERS.items():
        name = method.replace("_", " ")
        yield _order(f"{name}, means", _error_of(method, "mean", coupling, field), order)
        log_z_error = _error_of(method, "log_partition", coupling, field)
        if method == "mean_field":
            yield _order(f"{name}, log Z", log_z_error, order)
        else:
            yield _no_second_order(f"{name}, log Z", log_z_error, second_order)
        covariance_error = _error_of(method, "covariance", coupling, no_field)
        yield _order(f"{name}, covariances without fields", covariance_error, order)


def _textbook(coupling: Tensor, field: Tensor) -> Iterator[Check]:
    """The fixed points satisfy the equations as they are printed."""
    model = SpinModel.create(Spin.create(field), coupling)
    mean = model.mean_field(rtol=_EXACT).mean.flatten()
    yield close("mean field: m and tanh(Jm + x)", mean, torch.tanh(coupling @ mean + field))
    mean = model.tap(rtol=_EXACT).mean.flatten()
    onsager = mean * (coupling.square() @ (1 - mean.square()))
    yield close("TAP: m and tanh(Jm + x − mΣJ²(1 − m²))", mean, torch.tanh(coupling @ mean + field - onsager))
    adaptive = model.adaptive_tap(rtol=_EXACT)
    assert adaptive.solution is not None
    mean = adaptive.mean.flatten()
    curvature = adaptive.solution.value[:, 0, 1]
    variance = 1 - mean.square()
    response = torch.linalg.inv(torch.diag(curvature + 1 / variance) - coupling)
    tilted = torch.tanh(coupling @ mean + field - curvature * mean)
    yield close("adaptive TAP: m and tanh(Jm + x − Vm)", mean, tilted)
    yield close(
        "adaptive TAP: V and Λ − 1/[(Λ − J)⁻¹]_ii", curvature, curvature + 1 / variance - 1 / response.diagonal()
    )
    yield close("adaptive TAP: covariance and (Λ − J)⁻¹", adaptive.covariance.reshape(response.shape), response)
    yield at_least("adaptive TAP: least eigenvalue of (Λ − J)⁻¹", torch.linalg.eigvalsh(response)[0], 0.0)


def _other_sites(normal: Normal) -> Iterator[Check]:
    """Potts sites of three states, coupled by matrices."""
    coupling = _couplings(normal, 4, 3)
    site = Categorical.create(logits=0.5 * normal(4, 3))

    def error(method: str, scale: float) -> Tensor:
        model = SpinModel.create(site, scale * coupling)
        return getattr(model, method)(rtol=_EXACT).mean - model.exact().mean

    for method, order in _METHOD_ORDERS.items():
        name = method.replace("_", " ")
        yield _order(f"Potts sites, {name}, means", partial(error, method), order)


def _derivatives(coupling: Tensor, field: Tensor) -> Iterator[Check]:
    """The derivatives of adaptive TAP's log Z are its moments: it is stationary in means and V."""

    def log_z(coupling: Tensor, field: Tensor) -> Tensor:
        return SpinModel.create(Spin.create(field), coupling).adaptive_tap(rtol=_EXACT).log_partition

    coupling_slope, field_slope = torch.func.grad(log_z, (0, 1))(coupling, field)
    adaptive = SpinModel.create(Spin.create(field), coupling).adaptive_tap(rtol=_EXACT)
    mean = adaptive.mean.flatten()
    number = len(field)
    yield close("adaptive TAP: ∂log Z/∂x and m − tanh x", field_slope, mean - torch.tanh(field))
    second_moment = adaptive.covariance.reshape(number, number) + torch.outer(mean, mean)
    off_diagonal = 1 - torch.eye(number, dtype=mean.dtype)
    slope = coupling_slope.reshape(number, number)
    yield close("adaptive TAP: 2∂log Z/∂J_ij and χ_ij + m_im_j", 2 * off_diagonal * slope, off_diagonal * second_moment)


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
    # ‖J‖‖Σ‖ ≤ 0.6, so that Σ⁻¹ − J is positive definite.
    coupling = 0.6 * _couplings(normal, spins, size) / torch.linalg.matrix_norm(block, 2)
    matrix = coupling.transpose(1, 2).reshape(block.shape)
    inverse = torch.linalg.inv(block)
    location = (covariance @ pull.unsqueeze(-1)).squeeze(-1)
    response = torch.linalg.inv(inverse - matrix)
    mean = (response @ pull.flatten()).reshape(pull.shape)
    site = Gaussian.create(location, covariance)
    model = SpinModel.create(site, coupling)
    fluctuation = -0.5 * torch.logdet(torch.eye(len(block), dtype=block.dtype) - block @ matrix)
    log_z = 0.5 * (pull * (mean - location)).sum() + fluctuation
    results = {name: getattr(model, name)(rtol=_EXACT) for name in ("mean_field", "tap")}
    # For Gaussian sites one undamped step is the solution.
    results["adaptive_tap"] = model.adaptive_tap(damping=1.0)
    # The others stop within 1e-12 of a fixed point.
    tolerances = {"mean_field": CLOSED_FORM, "tap": CLOSED_FORM, "adaptive_tap": _ROUNDING}
    for method, result in results.items():
        name = method.replace("_", " ")
        yield close(f"{name}: means and (Σ⁻¹ − J)⁻¹X", result.mean, mean, tolerances[method])
        covariance_matrix = result.covariance.reshape(response.shape)
        yield close(f"{name}: covariance and (Σ⁻¹ − J)⁻¹", covariance_matrix, response, _ROUNDING)
    adaptive = results["adaptive_tap"]
    assert adaptive.solution is not None
    site_response = torch.stack([response[size * i :, size * i :][:size, :size] for i in range(spins)])
    curvature = torch.linalg.inv(covariance) - torch.linalg.inv(site_response)
    yield close("adaptive TAP: V and Σ⁻¹ − (G_ii)⁻¹", adaptive.solution.value[..., 1:], curvature)
    yield close("adaptive TAP: log Z and the Gaussian integral", adaptive.log_partition, log_z, _ROUNDING)
    deficit = log_z - results["mean_field"].log_partition
    yield close("mean field: what log Z lacks and −½ log det(I − ΣJ)", deficit, fluctuation, _ROUNDING)
    yield _response_by_derivative(site, coupling, response)
    yield from _cancellation(covariance, matrix, pull, mean, curvature)
    # Σ⁻¹ − J stays positive definite up to J/λ, with λ the largest eigenvalue of ΣJ.
    largest = eigenvalues(block @ matrix).real.amax()
    SpinModel.create(site, 0.99 / largest * coupling)
    yield all_raise("couplings beyond Σ⁻¹", ValueError, lambda: SpinModel.create(site, 1.01 / largest * coupling))


def _response_by_derivative(site: Gaussian, coupling: Tensor, response: Tensor) -> Check:
    """The derivative of the means in X is the covariance; a site's location is ΣX."""

    def means(location: Tensor) -> Tensor:
        model = SpinModel.create(Gaussian.create(location, site.covariance), coupling)
        return model.adaptive_tap(rtol=_EXACT).mean

    slope = torch.func.jacrev(means)(site.location).reshape(response.shape) @ torch.block_diag(*site.covariance)
    return close("adaptive TAP: ∂m/∂X and (Σ⁻¹ − J)⁻¹", slope, response)


def _cancellation(covariance: Tensor, matrix: Tensor, pull: Tensor, mean: Tensor, curvature: Tensor) -> Iterator[Check]:
    """The exact means solve the equation with a site's variance (Σ⁻¹ − V)⁻¹, and not with Σ alone, as published."""
    onsager = (curvature @ mean.unsqueeze(-1)).squeeze(-1)
    field = (matrix @ mean.flatten()).reshape(mean.shape) - onsager + pull
    corrected = torch.linalg.solve(torch.linalg.inv(covariance) - curvature, field.unsqueeze(-1)).squeeze(-1)
    yield close("the exact means and (Σ⁻¹ − V)⁻¹(Jm − Vm + X)", corrected, mean)
    published = (covariance @ field.unsqueeze(-1)).squeeze(-1)
    yield as_published(close("the exact means and Σ(Jm − Vm + X)", published, mean))
