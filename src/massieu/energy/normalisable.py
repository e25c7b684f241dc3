"""Which Boltzmann machines have a normaliser: Σ or ∫ exp(vᵀWh) a(dv) b(dh) < ∞ (B1, B2)."""

import torch
from torch import Tensor

from massieu.measures import Exponential, Gamma, Gaussian, Laplace, Measure, Poisson
from massieu.measures.combine import Tilted
from massieu.measures.coordinates import Coordinates

_HALF_LINE = (Poisson, Exponential, Gamma)
_WHOLE_LINE = (Gaussian, Laplace)


def why_not_normalisable(visible: Measure, hidden: Measure, weight: Tensor) -> str | None:
    """Why there is no normaliser; None if there is one, or if it is not known, as for unbounded units of other kinds."""
    if not bool((weight != 0).any()):
        return None
    names = f"{type(untilted(hidden)).__name__} hidden and {type(untilted(visible)).__name__} visible units"
    if is_bounded(visible):
        return _why_outside_domain(hidden, visible, weight, "hidden")
    if is_bounded(hidden):
        return _why_outside_domain(visible, hidden, weight.mT, "visible")
    # Two unbounded layers: the couplings' bilinear exponent decides, whatever linear one a tilt adds.
    visible = untilted(visible)
    hidden = untilted(hidden)
    if isinstance(visible, Gaussian) and isinstance(hidden, Gaussian):
        norm = _coupling_norm(visible, hidden, weight)
        if norm < 1:
            return None
        return (
            f"of {names} the couplings, in units of the standard deviations, must have a spectral norm below 1, got "
            f"{norm:.4g}"
        )
    if isinstance(visible, _HALF_LINE) and isinstance(hidden, _HALF_LINE):
        if bool((weight <= 0).all()):
            return None
        return f"{names} need weights that are nowhere positive, got up to {weight.max().item():.4g}"
    if isinstance(visible, (*_HALF_LINE, *_WHOLE_LINE)) and isinstance(hidden, (*_HALF_LINE, *_WHOLE_LINE)):
        return f"{names} never have one, whatever the weights, unless they are 0; bound one of the layers"
    return None


def untilted(measure: Measure) -> Measure:
    """The measure of which this is the tilt, where its class has none in closed form."""
    return untilted(measure.measure) if isinstance(measure, Tilted) else measure


def is_bounded(measure: Measure) -> bool:
    """Whether the support is bounded in every direction of the axes."""
    bounds = measure._range()
    return bounds is not None and all(bool(bound.isfinite().all()) for bound in bounds)


def _why_outside_domain(limited: Measure, bounded: Measure, weight: Tensor, layer: str) -> str | None:
    """How a state of the bounded layer takes the eta of the other layer out of its domain; None if no state does."""
    base = untilted(limited)
    limits = base._limits() if isinstance(base, Coordinates) else None
    if limits is None:
        return None
    tilt = _tilt(limited, weight)
    low, high = (limit - tilt for limit in limits)
    # max and max of the negative of each unit's field, over the states of the bounded layer.
    up = bounded._support(weight.mT)
    down = bounded._support(-weight.mT)
    assert up is not None and down is not None  # the layer is bounded
    beyond = (up >= high) | (-down <= low)
    if not bool(beyond.any()):
        return None
    unit = int(beyond.nonzero()[0])
    return (
        f"the field of {layer} unit {unit} reaches from {0.0 - down[unit].item():.4g} to {up[unit].item():.4g}, and "
        f"{type(base).__name__} needs {limited._domain()}"
    )


def _tilt(measure: Measure, weight: Tensor) -> Tensor:
    """What the measure adds to its eta."""
    if isinstance(measure, Tilted):
        return measure.eta + _tilt(measure.measure, weight)
    return weight.new_zeros(())


def _coupling_norm(visible: Gaussian, hidden: Gaussian, weight: Tensor) -> float:
    """The spectral norm of Σ_v^½ W Σ_h^½, in float64."""
    # Its square is the largest eigenvalue of Σ_s^½ᵀ (WᵀΣ_lW) Σ_s^½, a matrix of the size of the smaller layer s.
    larger = visible
    smaller = hidden
    if weight.shape[0] < weight.shape[1]:
        larger = hidden
        smaller = visible
        weight = weight.mT
    larger = larger.to(torch.float64, weight.device)
    smaller = smaller.to(torch.float64, weight.device)
    eigenvalues, vectors = torch.linalg.eigh(smaller.fisher(torch.zeros_like(smaller.location)))
    scaled = (weight.double() @ (vectors * eigenvalues.clamp_min(0).sqrt())).mT
    image = larger.fisher_vp(torch.zeros_like(scaled), scaled)
    return torch.linalg.eigvalsh(image @ scaled.mT)[-1].clamp_min(0).sqrt().item()
