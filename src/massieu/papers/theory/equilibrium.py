"""The equilibrium theorem of residual attention for Gaussian populations, item by item (S13).

Hidden states are natural parameters η. They are their own keys through a matrix, k = Mη, so that attention over the whole
population is ∇A of the key law, and a layer is T(η) = η + step·∇A(η). For the hidden law N(Σ⁻¹μ, Σ⁻¹) and M = Σ, T followed
by the `Renormalisation` to the law's own moments gives the law back.

Shim, arXiv 2205.01080, Theorem 1, is stated informally; this is its formal statement as proved in S13.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation import matrices
from massieu.foundation.arguments import check_one_device, floating, instance, number, real, whole_number
from massieu.foundation.doors import door
from massieu.foundation.values import promoted_dtype
from massieu.measures import Gaussian
from massieu.population.operator import AffineMap, ParticleMoments, moments, moments_after
from massieu.population.renormalisation import Renormalisation


def equilibrium(location: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"]) -> Gaussian:
    """The equilibrium law of hidden states, N(Σ⁻¹μ, Σ⁻¹), whose keys k = Ση have the law N(μ, Σ).

    Args:
        location: μ.
        covariance: Σ, positive definite.

    Raises:
        ValueError: shapes that do not fit, or Σ is not symmetric and positive definite.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import equilibrium
        >>> law = equilibrium(torch.tensor([2.0]), torch.tensor([[4.0]]))
        >>> law.mean(torch.zeros(1)).item(), law.fisher(torch.zeros(1)).item()
        (0.5, 0.25)
    """
    Renormalisation.create(floating("location", location), covariance)  # It checks both, as is needed here.
    dtype = promoted_dtype(location, covariance)
    location = location.to(dtype)
    covariance = covariance.to(dtype)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    precision = matrices.solve(covariance, identity.expand(covariance.shape))
    # Symmetric but for rounding.
    precision = 0.5 * (precision + precision.mT)
    return _gaussian((precision @ location.unsqueeze(-1)).squeeze(-1), precision)


def key_law(law: Gaussian, matrix: Float[Tensor, "*batch d d"]) -> Gaussian:
    """The law of k = Mη for η of this law: N(Mm, MCMᵀ); item 1 of S13 for M = Σ.

    Raises:
        ValueError: M has not the law's d columns.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import key_law
        >>> law = Gaussian.create(torch.ones(1), torch.eye(1))
        >>> key_law(law, torch.tensor([[3.0]])).fisher(torch.zeros(1)).item()
        9.0
    """
    width = _width_of("law", law)
    if floating("matrix", matrix).ndim < 2 or matrix.shape[-1] != width:
        raise ValueError(f"key_law needs a matrix of shape (*batch, d, {width}), got {tuple(matrix.shape)}")
    return _gaussian_after(AffineMap(matrix, torch.zeros_like(matrix[..., 0])), law)


@door(step=real)
def after_layer(law: Gaussian, keys: Gaussian, step: float) -> Gaussian:
    """The Gaussian law of hidden states after a layer η + step·∇A(η) over Gaussian keys N(μ, K).

    The map is affine, ∇A(η) = μ + Kη, so the law stays Gaussian. At the equilibrium its mean is Σ⁻¹μ + 2·step·μ and its
    covariance Σ⁻¹ + 2·step·1 + step²Σ (item 2 of S13): it has grown in every direction.

    Raises:
        ValueError: the laws differ in d, or a step that is not finite.
        TypeError: laws that are not Gaussian.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import after_layer
        >>> unit = Gaussian.create(torch.zeros(1), torch.eye(1))
        >>> after_layer(unit, unit, 0.5).fisher(torch.zeros(1)).item()  # 1.5²
        2.25
    """
    width = _width_of("law", law)
    key_width = _width_of("keys", keys)
    if width != key_width:
        raise ValueError(f"keys must have the hidden law's d = {width}, got {key_width}")
    number("step", step)
    return _gaussian_after(AffineMap(_layer_matrix(keys, step), step * moments(keys).mean), law)


@door(step=real)
def entropy_gain(keys: Gaussian, step: float) -> Float[Tensor, "*batch"]:
    """How much a layer adds to a population's differential entropy: log det(1 + step·K), in nats (item 3 of S13).

    Raises:
        ValueError: a step that is not finite.
        TypeError: keys that are not Gaussian.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import entropy_gain
        >>> keys = Gaussian.create(torch.zeros(2), torch.eye(2))
        >>> round(entropy_gain(keys, step=1.0).item(), 3)  # 2 log 2
        1.386
    """
    _width_of("keys", keys)
    number("step", step)
    return matrices.log_determinant(_layer_matrix(keys, step))


@door(step=real)
def whitened_map(law: Gaussian, keys: Gaussian, step: float) -> Float[Tensor, "*batch d d"]:
    """The linear part of a layer and renormalisation, in whitened coordinates: an orthogonal matrix.

    The law is standard in these coordinates, and the renormalisation goes back to its own moments. The map is the
    identity exactly where the covariances of law and keys commute, as at the equilibrium: there no particle moves (item
    4 of S13).

    Raises:
        ValueError: the laws differ in d, or the hidden law is degenerate.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import whitened_map
        >>> unit = Gaussian.create(torch.zeros(2), torch.eye(2))
        >>> [round(x, 3) for x in whitened_map(unit, unit, 0.5).diagonal().tolist()]
        [1.0, 1.0]
    """
    after = moments(after_layer(law, keys, step)).covariance
    covariance = moments(law).covariance.to(after)
    layer = _layer_matrix(keys, step).to(after)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    # To the covariance 1; only its matrix is used, so that any location does.
    whitening = Renormalisation(identity[0], identity)
    return whitening.matrix(after) @ layer @ matrices.square_root(covariance, owner="whitened_map")


def sample_error(keys: Gaussian, eta: Float[Tensor, "*batch_query d"], count: int) -> Float[Tensor, "*batch_query"]:
    """Root-mean-square error of attention at η over `count` random keys, to leading order in 1/count (S15).

    √(e^(ηᵀKη)·(tr K + ‖Kη‖²)/count): fewer keys than e^(ηᵀKη) say nothing about the population.

    Raises:
        ValueError: a `count` below 1, or η of another d.
        TypeError: keys that are not Gaussian.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import sample_error
        >>> keys = Gaussian.create(torch.zeros(1), torch.eye(1))
        >>> few, many = (sample_error(keys, torch.zeros(1), count).item() for count in (100, 400))
        >>> round(few / many, 3)  # √4
        2.0
    """
    _width_of("keys", keys)
    check_one_device(keys=keys.location, eta=floating("eta", eta))
    whole_number("count", count, least=1)
    k_eta = keys.fisher_vp(eta, eta)  # Kη
    trace = keys.fisher(eta).diagonal(dim1=-2, dim2=-1).sum(-1)
    # The root of e^(ηᵀKη) is taken in the exponent.
    return (0.5 * (eta.to(k_eta) * k_eta).sum(-1)).exp() * ((trace + k_eta.square().sum(-1)) / count).sqrt()


def _gaussian(location: Tensor, covariance: Tensor) -> Gaussian:
    """The law without the checks of `Gaussian.create`, and without a factor."""
    return Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))


def _gaussian_after(affine: AffineMap, law: Gaussian) -> Gaussian:
    """The law of the map's values, in the common dtype."""
    before = moments(law)
    dtype = promoted_dtype(affine.matrix, *before)
    affine = AffineMap(affine.matrix.to(dtype), affine.offset.to(dtype))
    before = ParticleMoments(before.mean.to(dtype), before.covariance.to(dtype))
    return _gaussian(*moments_after(affine, before))


def _layer_matrix(keys: Gaussian, step: float) -> Tensor:
    """1 + step·K, the linear part of a layer."""
    covariance = moments(keys).covariance
    return torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device) + step * covariance


def _width_of(name: str, law: Gaussian) -> int:
    """The law's d; a TypeError if it is another measure."""
    return instance(name, law, Gaussian, "a massieu.measures.Gaussian").location.shape[-1]
