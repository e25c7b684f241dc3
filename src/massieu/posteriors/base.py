"""The law of a latent z after some tokens: one interface for all exact posteriors (Z2, Z3).

A `Posterior` is the law of z given the tokens that it has seen; a prior is the posterior of no tokens, made by ``create``.
``prior.posterior(tokens, mask)`` is the law after more of them, so a context can be read in pieces, in any order where tokens
are exchangeable. Its ``log_evidence`` is the log-probability of everything seen: the sum of the log-predictives.

Batch dimensions are on the left. A law of batch (*batch) reads tokens of shape (*batch, *more, n, *event), and the posterior
then has the batch (*batch, *more): one prior serves many sequences. Laws are frozen values and pytrees, as measures are.
"""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu import ops
from massieu.foundation.arguments import (
    boolean,
    check_finite,
    check_one_device,
    check_range,
    check_shape,
    floating,
    real_tensor,
)
from massieu.foundation.values import Value, need_batch, promoted_dtype, spread
from massieu.ops.attention import AttentionResult


class Posterior(Value):
    """Base class: the posterior of a latent z given the tokens seen so far. See the module's docstring.

    Every class has a `mean`: that of the latent, as the class parametrises it. `create` makes a prior from tensors, arrays,
    lists or numbers, and a number stands for all of a batch. It raises a TypeError for what is none of these, and a
    ValueError for shapes that do not fit each other, for NaN and infinities, and for numbers out of the range that it names.

    Attributes:
        log_evidence: log p(tokens seen so far) in nats, shape (*batch); 0 for a prior.

    Example:
        >>> import torch
        >>> from massieu.posteriors import DirichletMultinomial
        >>> prior = DirichletMultinomial.create([1.0, 1.0])
        >>> law = prior.posterior(torch.tensor([0])).posterior(torch.tensor([0, 1]))
        >>> round(law.log_evidence.exp().item(), 4), round(law.log_predictive(torch.tensor(0)).exp().item(), 4)
        (0.0833, 0.6)
    """

    _family: ClassVar[str] = "posteriors"

    log_evidence: Float[Tensor, "*batch"] = dataclasses.field(kw_only=True)

    @abstractmethod
    def posterior(self, tokens: Any, mask: Bool[Tensor, "..."] | None = None) -> Self:
        """The law after these tokens too, of which `mask` is True for those that are seen (all by default).

        What a masked token holds is never read: NaN and infinities there change nothing, derivatives neither.

        Raises:
            ValueError: shapes that do not fit, or a token outside the support.
            TypeError: tokens or mask of a wrong dtype.
        """

    @abstractmethod
    def log_predictive(self, token: Any) -> Float[Tensor, "..."]:
        """log p(next token | tokens seen) in nats, at tokens of shape (*batch, *query, *event): (*batch, *query).

        Raises:
            ValueError, TypeError: as `posterior`.
        """

    @property
    def batch_shape(self) -> torch.Size:
        """The shape of a batch of laws."""
        return self.log_evidence.shape

    def _spread(self, lead: torch.Size) -> Self:
        """The law for every item of `lead`, of which its own batch shape is a prefix."""
        name = type(self).__name__
        batch_dims = len(self.batch_shape)

        def widened(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return spread(name, leaf, lead, leaf.ndim - batch_dims)

        if len(lead) > batch_dims:
            return pytree.tree_map(widened, self)
        return self

    def _admit(self, tokens: Tensor, mask: Tensor | None, event: tuple[int, ...]) -> tuple[Self, Tensor, Tensor]:
        """The law spread to the tokens' batch, the tokens with 0 where they are masked, and which are seen.

        Law and tokens come in one floating dtype of at least float32.
        """
        law, tokens = self._fit("tokens", tokens, ("n", *event))
        seen = check_mask(mask, tokens.shape[: tokens.ndim - len(event)], tokens)
        tokens = torch.where(seen.reshape(*seen.shape, *[1] * len(event)), tokens, 0.0)
        check_finite(tokens=tokens)
        return law._spread(seen.shape[:-1]), tokens, seen

    def _admit_token(self, token: Tensor, event: tuple[int, ...], name: str = "token") -> tuple[Self, Tensor]:
        """The law, spread, and the token, both in one dtype."""
        law, token = self._fit(name, token, event)
        check_finite(**{name: token})
        return law._spread(token.shape[: token.ndim - len(event)]), token

    def _fit(self, name: str, tokens: Tensor, event: tuple[int | str, ...]) -> tuple[Self, Tensor]:
        floating(name, tokens)
        need_batch(type(self).__name__, name, tokens.shape, self.batch_shape, event)
        self._check_device(**{name: tokens})
        return self._promoted(tokens)


class AttentionForm(NamedTuple):
    """Arguments with which `ops.attention`, at scale 1, returns a posterior mean (Z3)."""

    query: Float[Tensor, "B 1 1 D"]
    key: Float[Tensor, "B 1 N D"]
    value: Float[Tensor, "B 1 N E"]
    log_weight: Float[Tensor, "B 1 1 N"]
    batch: torch.Size
    """The batch shape of which B is the product."""

    def attend(self) -> AttentionResult:
        """The attention: output (*batch, E), the posterior mean; log_partition (*batch), the log-strength or log-evidence."""
        result = ops.attention(self.query, self.key, self.value, log_weight=self.log_weight, scale=1.0)
        return AttentionResult(result.output.reshape(*self.batch, -1), result.log_partition.reshape(self.batch))


def with_sink(
    sink_value: Float[Tensor, "*batch d"],
    strength: Float[Tensor, "*batch"],
    tokens: Float[Tensor, "*batch n d"],
    log_weight: Float[Tensor, "*batch n"],
) -> AttentionForm:
    """Attention without scores over n + 1 slots: a sink of this value and logit log(strength), then the tokens."""
    values = torch.cat([sink_value.unsqueeze(-2), tokens], -2).reshape(-1, tokens.shape[-2] + 1, tokens.shape[-1])
    logits = torch.cat([strength.log().unsqueeze(-1), log_weight], -1).reshape(len(values), 1, 1, -1)
    # Keys of zeros give scores of 0: the weights are the softmax of the logits alone.
    key = values.new_zeros(len(values), 1, values.shape[-2], 1)
    query = key[:, :, :1]
    return AttentionForm(query, key, values.unsqueeze(1), logits, sink_value.shape[:-1])


def check_mask(mask: Tensor | None, shape: torch.Size, like: Tensor) -> Bool[Tensor, "..."]:
    """The mask, True for tokens that are seen; by default one of this shape that is True everywhere."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=like.device)
    check_shape("mask", boolean("mask", mask), shape)
    check_one_device(tokens=like, mask=mask)
    return mask


def numbers(event_dims: int, positive: tuple[str, ...] = (), **parameters: Any) -> list[Tensor]:
    """The parameters of a law in one dtype of at least float32; or an error unless they are finite and those named positive.

    The first has `event_dims` dimensions after those of the batch; the others are one number for each law, or one for all.
    """
    like = next((value for value in parameters.values() if isinstance(value, Tensor)), None)
    tensors = {name: real_tensor(name, value, like) for name, value in parameters.items()}
    check_one_device(**tensors)
    first = next(iter(tensors))
    shape = tensors[first].shape
    if len(shape) < event_dims:
        raise ValueError(f"{first} must have at least {event_dims} dimensions, got shape {tuple(shape)}")
    batch = shape[: len(shape) - event_dims]
    dtype = promoted_dtype(*tensors.values())
    for name, tensor in tensors.items():
        check_range(name, tensor, above=0 if name in positive else None)
        if name != first and tensor.ndim:
            check_shape(name, tensor, batch)
    return [(tensor if name == first else tensor.expand(batch)).to(dtype) for name, tensor in tensors.items()]
