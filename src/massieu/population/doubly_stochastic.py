"""Attention whose weights sum to one over keys and over queries: Sinkhorn's algorithm without the matrix (N8)."""

from typing import NamedTuple, Self, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu import ops, solve
from massieu.foundation import matrices
from massieu.foundation.arguments import (
    check_finite,
    check_log_probabilities,
    check_one_device,
    check_values,
    expanded,
    floating,
    number,
    real,
    whole_number,
)
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.values import promoted_dtype, static_field
from massieu.measures import Gaussian
from massieu.ops.sharded.collectives import Peers
from massieu.population.head import Head, HeadOptions, checked
from massieu.population.operator import AffineMap

_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
_ROUNDINGS = 8
"""Relative tolerance of the potentials, in units of the dtype's rounding."""


class SinkhornResult(NamedTuple):
    """Potentials f and g that make weights doubly stochastic: P_ij = w_j exp(scale·q_i·k_j + f_i + g_j).

    Σ_j P_ij = 1 for every token i, and Σ_i w_i P_ij = w_j: P v has the same mean over the population (with weights w) as v.
    """

    query_potential: Float[Tensor, "B H n"]
    """f, nats; 0 for hidden tokens."""
    key_potential: Float[Tensor, "B H n"]
    """g, with mean 0 over the visible tokens (a constant could be moved from g to f); 0 for hidden tokens."""
    residual: Float[Tensor, "B H"]
    """Root mean square over tokens of Σ_i w_i P_ij/w_j − 1; the sums over keys are exact."""
    steps: Int[Tensor, "B H"]
    """Number of updates of both potentials."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class DoublyStochasticResult(NamedTuple):
    """The result of `doubly_stochastic_attention`."""

    output: Float[Tensor, "B H n e"]
    """Σ_j P_ij value_j."""
    potentials: SinkhornResult

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(scale=real)
def sinkhorn(
    query: Float[Tensor, "B H n k"],
    key: Float[Tensor, "B H n k"],
    *,
    log_weight: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    max_steps: int = 1000,
) -> SinkhornResult:
    """Potentials of doubly stochastic attention, by log Z of queries and of keys in turn; memory is linear in tokens.

    The map contracts in Hilbert's metric (Birkhoff) by a factor of at most tanh²(range of the scores/4). This is slow if
    scores spread over tens of nats, so iterates are accelerated. If query and key are one tensor, there is one potential
    (f = g up to a constant), and u ← (u − log Z(u))/2 finds it for all scores: near it errors shrink by (I − P)/2, where
    P ⪰ 0. Derivatives in query, key and log_weight, of every order, are those of the implicit function theorem; nothing of
    the iteration is kept.

    Args:
        query, key: Those of the same tokens; float16 and bfloat16 are promoted. If they are equal, pass one tensor twice.
        log_weight: log w, mass of each token both as query and as key; broadcasts to (B, H, n), −inf hides a token.
        scale: Inverse temperature, 1/ε; k^-½ by default.
        tolerance: Largest residual; None: 1e-11 in float64, 1e-5 in float32, and 8 roundings of the potentials more.
        max_steps: Largest number of steps.

    Raises:
        ConvergenceError: the residual is not reached; scores with a large range need a smaller scale.
        TypeError, ValueError: shapes or dtypes do not fit, the scale is not finite, or a log-weight is NaN or +inf.

    Source: Sinkhorn and Knopp (1967); as attention, Sander et al., "Sinkformers", arXiv 2110.11773.

    Example:
        >>> import torch
        >>> from massieu.population import sinkhorn
        >>> points = torch.eye(2).reshape(1, 1, 2, 2)
        >>> found = sinkhorn(points, points, scale=1.0)
        >>> scores = points @ points.mT + found.query_potential.unsqueeze(-1) + found.key_potential.unsqueeze(-2)
        >>> [round(x, 3) for x in scores.exp().sum(-2).flatten().tolist()]
        [1.0, 1.0]
    """
    is_tied = query is key
    whole_number("max_steps", max_steps, least=1)
    if tolerance is not None:
        number("tolerance", tolerance, least=0)
    query, key, weight, scale = _admitted(query, key, log_weight, scale)
    tolerance = _TOLERANCE[query.dtype] if tolerance is None else tolerance
    if is_tied and scale > 0:
        # The scores are symmetric: √scale·x_i · √scale·x_j.
        step = _symmetric_step
        parameters = (scale**0.5 * query, weight)
    else:
        step = _alternating_step
        parameters = (scale * query, key, weight)
    solution = solve.fixed_point(
        step,
        query.new_zeros(weight.shape),
        parameters,
        max_steps=max_steps,
        atol=tolerance * weight.shape[-1] ** 0.5,
        rtol=_ROUNDINGS * torch.finfo(query.dtype).eps,
        adjoint=solve.Implicit(check_attraction=False),
    )
    is_hidden = weight == -torch.inf
    g = _of_mean_zero(solution.value, is_hidden)
    # With this f the sums over keys are 1 exactly; what the iteration has left is in the sums over queries.
    f = _potential(scale * query, key, weight + g, is_hidden)
    with torch.no_grad():
        # Σ_i w_i P_ij/w_j = exp(g_j + log Σ_i w_i exp(scores + f_i)).
        error = torch.expm1(g - _potential(key, scale * query, weight + f, is_hidden)).masked_fill(is_hidden, 0.0)
        residual = (error.square().sum(-1) / (~is_hidden).sum(-1).clamp_min(1)).sqrt()
    return SinkhornResult(f, g, residual, solution.steps)


@door(scale=real)
def doubly_stochastic_attention(
    query: Float[Tensor, "B H n k"],
    key: Float[Tensor, "B H n k"],
    value: Float[Tensor, "B H n e"],
    *,
    log_weight: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    max_steps: int = 1000,
) -> DoublyStochasticResult:
    """Attention with doubly stochastic weights from `sinkhorn`; arguments, derivatives and errors are those of `sinkhorn`.

    If queries, keys and values are the tokens, the output is half the gradient, in all tokens at once, of −(Σf + Σg)/scale.
    So unlike attention it is a joint gradient flow (S3, trap 13). Hidden tokens have the output of a query that others do
    not see.

    Example:
        >>> import torch
        >>> from massieu.population import doubly_stochastic_attention
        >>> points = torch.eye(3).reshape(1, 1, 3, 3)
        >>> found = doubly_stochastic_attention(points, points, value=points)  # the values make the weights themselves
        >>> [round(x, 3) for x in found.output.sum(-2).flatten().tolist()]
        [1.0, 1.0, 1.0]
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        floating(name, tensor)
    check_one_device(query=query, value=value)
    potentials = sinkhorn(query, key, log_weight=log_weight, scale=scale, tolerance=tolerance, max_steps=max_steps)
    promoted, keys, weight, scale = _admitted(query, key, log_weight, scale)
    # f is the same for all keys of a query and cancels in the softmax; g is a log-weight of the keys.
    key_log_weight = (weight + potentials.key_potential).unsqueeze(-2)
    output = ops.attention(promoted, keys, value.to(promoted), log_weight=key_log_weight, scale=scale).output
    return DoublyStochasticResult(output.to(query.dtype), potentials)


class DoublyStochasticLayer(Head):
    """A layer of doubly stochastic self-attention (N8), which keeps the mean of the values.

    With tied queries, keys and values, (P x − x)·scale → ½∇log ρ as the scale grows, for tokens of density ρ. P moves tokens
    towards higher density, and x − (P x − x) is a step 1/(2·scale) of the heat equation.

    Over a Gaussian law (`gaussian`) P is the plan of entropic optimal transport between the law and itself, which is Gaussian.
    In coordinates in which the law is standard and the scores are xᵀGy, a token's mean partner is 2(1 + (1 + 4GᵀG)^½)⁻¹Gᵀx.
    A singular covariance is a ValueError. Use `create`.

    Attributes:
        query_weight, key_weight, value_weight: Matrices of the one head; None: the tokens as they are.
        scale: Inverse temperature; None: k^-½.
        step_size, residual, activation: As in `AttentionLayer`; by default the output replaces the token.
        tolerance, max_steps: As in `sinkhorn`, whose errors a call raises.

    Source: Janati et al., arXiv 2006.02572, for scores of a squared distance.

    Example:
        >>> import torch
        >>> from massieu.population import DoublyStochasticLayer
        >>> moved = DoublyStochasticLayer.create(scale=1.0)(torch.tensor([[0.0], [1.0], [5.0]]))
        >>> round(moved.mean().item(), 3)
        2.0
    """

    tolerance: float | None = static_field()
    max_steps: int = static_field()

    @classmethod
    def create(cls, *, tolerance: float | None = None, max_steps: int = 1000, **options: Unpack[HeadOptions]) -> Self:
        """A layer; `tolerance` and `max_steps` are checked by the call.

        Raises:
            TypeError: options of a wrong kind.
            ValueError: a scale or a step size that is not finite.
        """
        return cls(**checked(options), tolerance=tolerance, max_steps=max_steps)

    def gaussian(self, law: Gaussian) -> Gaussian:
        before, tilt, value = self._matrices(law)
        owner = "DoublyStochasticLayer.gaussian"
        root = matrices.square_root(before.covariance, owner=owner)
        identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        # Tokens are root times standard ones, in whose coordinates the scores' matrix is G.
        g_transposed = root @ tilt @ root
        denominator = identity + matrices.square_root(identity + 4 * g_transposed @ g_transposed.mT, owner=owner)
        matrix = 2 * root @ matrices.solve(denominator, root @ tilt)
        # The mean of the law is its own mean partner: x ↦ m + matrix·(x − m).
        mean = before.mean.unsqueeze(-1)
        offset = (value @ (mean - matrix @ mean)).squeeze(-1)
        return self._law_after(before, AffineMap(value @ matrix, offset))

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        if 0 in particles.shape[:-2]:
            return particles
        query, key, value = self._heads(particles)
        attention = doubly_stochastic_attention(
            query, key, value, scale=self.scale, tolerance=self.tolerance, max_steps=self.max_steps
        )
        return self._after(particles, attention.output)


def _alternating_step(g: Tensor, query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """One update of f from g, and of g from f; g keeps mean 0."""
    is_hidden = weight == -torch.inf
    f = _potential(query, key, weight + g, is_hidden)
    return _of_mean_zero(_potential(key, query, weight + f, is_hidden), is_hidden)


def _symmetric_step(u: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """The mean of the one potential and of the update from it, which would alternate between two values by itself."""
    return (u + _potential(tokens, tokens, weight + u, weight == -torch.inf)) / 2


def _of_mean_zero(potential: Tensor, is_hidden: Tensor) -> Tensor:
    mean = potential.sum(-1, keepdim=True) / (~is_hidden).sum(-1, keepdim=True).clamp_min(1)
    return (potential - mean).masked_fill(is_hidden, 0.0)


def _potential(query: Tensor, key: Tensor, weight: Tensor, is_hidden: Tensor) -> Tensor:
    """The potential of the queries for which their weights on the keys sum to 1: −log Z; 0 for hidden tokens."""
    return -ops.log_partition(query, key, log_weight=weight.unsqueeze(-2), scale=1.0).masked_fill(is_hidden, 0.0)


def _admitted(
    query: Tensor, key: Tensor, log_weight: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries, keys and log-weights (B, H, n) of one dtype of at least float32, and the scale."""
    if floating("query", query).ndim != 4 or query.shape != floating("key", key).shape:
        raise ValueError(
            f"query and key must have one shape (B, H, n, k), got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.numel() == 0:
        raise ValueError(f"query and key must have at least one token and one dimension, got {tuple(query.shape)}")
    inverse_temperature = query.shape[-1] ** -0.5 if scale is None else number("scale", scale)
    check_values(query=query, key=key)
    check_finite(query=query, key=key)
    dtype = promoted_dtype(query)
    shape = query.shape[:-1]
    if log_weight is None:
        weight = torch.zeros(shape, dtype=dtype, device=query.device)
    else:
        check_values(log_weight=floating("log_weight", log_weight))
        check_log_probabilities(log_weight=log_weight)
        weight = expanded("log_weight", log_weight.to(query.device, dtype), shape)
    return query.to(dtype), key.to(dtype), weight, inverse_temperature
