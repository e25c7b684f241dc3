"""What is known of a latent z after some tokens: one shape of interface for all exact posteriors (Z2, Z3).

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
        name, own = type(self).__name__, len(self.batch_shape)

        def widened(leaf: Any) -> Any:
            return spread(name, leaf, lead, leaf.ndim - own) if isinstance(leaf, Tensor) else leaf

        return pytree.tree_map(widened, self) if len(lead) > own else self

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
        """The attention: output (*batch, E), the posterior mean; log_partition (*batch), what averages leave out."""
        found = ops.attention(self.query, self.key, self.value, log_weight=self.log_weight, scale=1.0)
        return AttentionResult(found.output.reshape(*self.batch, -1), found.log_partition.reshape(self.batch))


def with_sink(
    sink_value: Float[Tensor, "*batch d"],
    strength: Float[Tensor, "*batch"],
    tokens: Float[Tensor, "*batch n d"],
    log_weight: Float[Tensor, "*batch n"],
) -> AttentionForm:
    """Attention without scores over n + 1 slots: a sink of this value and logit log(strength), then the tokens."""
    values = torch.cat([sink_value.unsqueeze(-2), tokens], -2).reshape(-1, tokens.shape[-2] + 1, tokens.shape[-1])
    logits = torch.cat([strength.log().unsqueeze(-1), log_weight], -1).reshape(len(values), 1, 1, -1)
    nothing = values.new_zeros(len(values), 1, values.shape[-2], 1)
    return AttentionForm(nothing[:, :, :1], nothing, values.unsqueeze(1), logits, sink_value.shape[:-1])


def check_mask(mask: Tensor | None, shape: torch.Size, like: Tensor) -> Bool[Tensor, "..."]:
    """The mask, True for tokens that are seen, or one of that shape that is True everywhere."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=like.device)
    check_shape("mask", boolean("mask", mask), shape)
    check_one_device(tokens=like, mask=mask)
    return mask


def numbers(events: int, positive: tuple[str, ...] = (), **given: Any) -> list[Tensor]:
    """The parameters in one dtype of at least float32, finite, and those named positive.

    The first has the batch's shape and so many event dimensions; the others are one number a law, or one for all of them.
    """
    like = next((value for value in given.values() if isinstance(value, Tensor)), None)
    tensors = {name: real_tensor(name, value, like) for name, value in given.items()}
    check_one_device(**tensors)
    first, *_ = tensors
    if tensors[first].ndim < events:
        raise ValueError(f"{first} must have at least {events} dimensions, got shape {tuple(tensors[first].shape)}")
    batch, dtype = tensors[first].shape[: tensors[first].ndim - events], promoted_dtype(*tensors.values())
    for name, tensor in tensors.items():
        check_range(name, tensor, above=0 if name in positive else None)
        if name != first and tensor.ndim:
            check_shape(name, tensor, batch)
    return [(tensor if name == first else tensor.expand(batch)).to(dtype) for name, tensor in tensors.items()]
