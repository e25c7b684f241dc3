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
from massieu.measures import Gaussian
from massieu.population.arguments import need_finite, need_gaussians, need_one_device, need_tensors
from massieu.population.renormalisation import Renormalisation


def equilibrium(location: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"]) -> Gaussian:
    """N(Σ⁻¹μ, Σ⁻¹): the hidden law of which the keys k = Ση are N(μ, Σ).

    Args:
        location: μ.
        covariance: Σ, positive definite.

    Raises:
        ValueError: shapes that do not fit, or Σ is not symmetric and positive definite.
    """
    need_tensors(location=location, covariance=covariance)
    Renormalisation.create(location, covariance)
    dtype = _common_dtype(location, covariance)
    location, covariance = location.to(dtype), covariance.to(dtype)
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    precision = matrices.solve(covariance, identity.expand(covariance.shape))
    precision = 0.5 * (precision + precision.mT)
    return _gaussian((precision @ location.unsqueeze(-1)).squeeze(-1), precision)


def key_law(law: Gaussian, matrix: Float[Tensor, "*batch d d"]) -> Gaussian:
    """The law of k = Mη for η of this law: N(Mm, MCMᵀ); item 1 of S13 for M = Σ.

    Raises:
        ValueError: M has not the law's d columns.
    """
    need_gaussians(law=law)
    need_tensors(matrix=matrix)
    if matrix.ndim < 2 or matrix.shape[-1] != law.location.shape[-1]:
        needed = f"(*batch, d, {law.location.shape[-1]})"
        raise ValueError(f"key_law needs a matrix of shape {needed}, got {tuple(matrix.shape)}")
    dtype = _common_dtype(law.location, law.covariance, matrix)
    matrix = matrix.to(dtype)
    covariance = matrix @ _covariance(law).to(dtype) @ matrix.mT
    return _gaussian((matrix @ law.location.to(dtype).unsqueeze(-1)).squeeze(-1), 0.5 * (covariance + covariance.mT))


def after_layer(law: Gaussian, keys: Gaussian, step: float) -> Gaussian:
    """The law of T(η) = η + step·∇A(η), ∇A(η) = μ + Kη for keys N(μ, K): affine, so that it is Gaussian again.

    At the equilibrium its mean is Σ⁻¹μ + 2·step·μ and its covariance Σ⁻¹ + 2·step·1 + step²Σ (item 2 of S13): it has grown
    in every direction.

    Raises:
        ValueError: the laws differ in d, or a step that is not finite.
        TypeError: laws that are not Gaussian.
    """
    _need_same_width(law, keys)
    need_finite(step=step)
    dtype = _common_dtype(law.location, law.covariance, keys.location, keys.covariance)
    matrix = _layer_matrix(keys, step).to(dtype)
    covariance = matrix @ _covariance(law).to(dtype) @ matrix.mT
    location = (matrix @ law.location.to(dtype).unsqueeze(-1)).squeeze(-1) + step * keys.location
    return _gaussian(location, 0.5 * (covariance + covariance.mT))


def entropy_gain(keys: Gaussian, step: float) -> Float[Tensor, "*batch"]:
    """log det(1 + step·K), in nats: what a layer adds to the differential entropy of any population (item 3 of S13).

    Raises:
        ValueError: a step that is not finite.
        TypeError: keys that are not Gaussian.
    """
    need_gaussians(keys=keys)
    need_finite(step=step)
    return matrices.log_determinant(_layer_matrix(keys, step))


def whitened_map(law: Gaussian, keys: Gaussian, step: float) -> Float[Tensor, "*batch d d"]:
    """The linear part of RN∘T in coordinates in which the law is standard, RN back to the law's own moments: orthogonal.

    It is the identity exactly where the covariances of law and keys commute, as at the equilibrium: there no particle moves
    (item 4 of S13).

    Raises:
        ValueError: the laws differ in d, or the hidden law is degenerate.
    """
    after = _covariance(after_layer(law, keys, step))
    covariance, layer = _covariance(law).to(after), _layer_matrix(keys, step).to(after)
    standard = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    whiten = Renormalisation(standard[0], standard)
    return whiten.matrix(after) @ layer @ matrices.square_root(covariance, owner="whitened_map")


def sample_error(keys: Gaussian, eta: Float[Tensor, "*batch_query d"], count: int) -> Float[Tensor, "*batch_query"]:
    """Root-mean-square error ‖·‖ of attention at η over `count` keys drawn from the law, to leading order in 1/count (S15).

    √(e^(ηᵀKη)·(tr K + ‖Kη‖²)/count): fewer keys than e^(ηᵀKη) say nothing about the population.

    Raises:
        ValueError: a `count` below 1, or η of another d.
        TypeError: keys that are not Gaussian.
    """
    need_gaussians(keys=keys)
    need_tensors(eta=eta)
    need_one_device(keys=keys.location, eta=eta)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    pull = keys.fisher_vp(eta, eta)
    trace = keys.fisher(eta).diagonal(dim1=-2, dim2=-1).sum(-1)
    return (0.5 * (eta.to(pull) * pull).sum(-1)).exp() * ((trace + pull.square().sum(-1)) / count).sqrt()


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _gaussian(location: Tensor, covariance: Tensor) -> Gaussian:
    return Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))


def _covariance(law: Gaussian) -> Tensor:
    return law.fisher(torch.zeros_like(law.location))


def _layer_matrix(keys: Gaussian, step: float) -> Tensor:
    covariance = _covariance(keys)
    return torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device) + step * covariance


def _need_same_width(law: Gaussian, keys: Gaussian) -> None:
    need_gaussians(law=law, keys=keys)
    hidden, width = law.location.shape[-1], keys.location.shape[-1]
    if hidden != width:
        raise ValueError(f"keys must have the hidden law's d = {hidden}, got {width}")
