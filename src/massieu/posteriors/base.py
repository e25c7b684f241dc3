"""What is known of a latent z after some tokens: one shape of interface for all exact posteriors (Z2, Z3).

A `Posterior` is the law of z given the tokens that it has seen; a prior is the posterior of no tokens, made by ``create``.
``prior.posterior(tokens, mask)`` is the law after more of them, so a context can be read in pieces, in any order where tokens
are exchangeable. Its ``log_evidence`` is the log-probability of everything seen: the sum of the log-predictives.

Batch dimensions are on the left. A law of batch (*batch) reads tokens of shape (*batch, *more, n, *event), and the posterior
then has the batch (*batch, *more): one prior serves many sequences. Laws are frozen values and pytrees, as measures are.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self, dataclass_transform

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu import ops
from massieu.measures import static_field
from massieu.measures.value import register, values_are_readable
from massieu.posteriors.arguments import check_device, check_finite, told


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field,))
class Posterior(ABC):
    """The law of a latent z given the tokens seen so far. See the module's docstring.

    Every class has a `mean`: that of the latent, as the class parametrises it.

    Attributes:
        log_evidence: log p(tokens seen so far) in nats, shape (*batch); 0 for a prior.
    """

    log_evidence: Float[Tensor, "*batch"]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        register(dataclasses.dataclass(frozen=True, eq=False)(cls))

    @abstractmethod
    def posterior(self, tokens: Shaped[Tensor, "..."], mask: Bool[Tensor, "..."] | None = None) -> Self:
        """The law after these tokens too, of which `mask` is True for those that are seen (all by default).

        What a masked token holds is never read: NaN and infinities there change nothing, derivatives neither.

        Raises:
            ValueError: shapes that do not fit, or a token outside the support.
            TypeError: tokens or mask of a wrong dtype.
        """

    @abstractmethod
    def log_predictive(self, token: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
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
        own = len(self.batch_shape)
        if lead[:own] != self.batch_shape:
            raise ValueError(
                f"{type(self).__name__} of batch shape {tuple(self.batch_shape)} cannot read tokens of batch shape "
                f"{tuple(lead)}: the first must be a prefix of the second"
            )
        ones = (1,) * (len(lead) - own)

        def spread(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            event = leaf.shape[own:]
            return leaf.reshape(*leaf.shape[:own], *ones, *event).expand(*lead, *event)

        return pytree.tree_map(spread, self) if ones else self

    def _in(self, dtype: torch.dtype) -> Self:
        def cast(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return self if self.log_evidence.dtype == dtype else pytree.tree_map(cast, self)

    def _admit(self, tokens: Tensor, mask: Tensor | None, event: tuple[int, ...]) -> tuple[Self, Tensor, Tensor]:
        """The law spread to the tokens' batch, the tokens with 0 where they are masked, and which are seen.

        Law and tokens come in one floating dtype of at least float32.
        """
        law, tokens, lead = self._fit(tokens, event, "tokens", "n")
        seen = check_mask(mask, (*lead, tokens.shape[len(lead)]), tokens)
        visible = seen.reshape(*seen.shape, *[1] * len(event))
        tokens = torch.where(visible, tokens, 0.0)
        check_finite(tokens=tokens)
        return law._spread(lead), tokens, seen

    def _admit_token(self, token: Tensor, event: tuple[int, ...]) -> tuple[Self, Tensor]:
        """The law, spread, and the token, both in one dtype."""
        law, token, lead = self._fit(token, event, "token")
        check_finite(token=token)
        return law._spread(lead), token

    def _check_device(self, name: str, tokens: Tensor) -> None:
        # No `max` with a key: compiled code cannot have it.
        longest, *others = [leaf for leaf in pytree.tree_leaves(self) if isinstance(leaf, Tensor)]
        for leaf in others:
            longest = leaf if leaf.ndim > longest.ndim else longest
        check_device(**{"the law": longest, name: tokens})

    def _fit(self, tokens: Tensor, event: tuple[int, ...], name: str, *count: str) -> tuple[Self, Tensor, torch.Size]:
        if not isinstance(tokens, Tensor) or not tokens.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {told(tokens)}")
        ends = len(event) + len(count)
        if tokens.ndim < ends or (event and tuple(tokens.shape[-len(event) :]) != event):
            needed = ("*batch", *count, *event)
            raise ValueError(f"{type(self).__name__} needs {name} of shape {needed}, got {tuple(tokens.shape)}")
        self._check_device(name, tokens)
        dtype = torch.promote_types(torch.promote_types(tokens.dtype, self.log_evidence.dtype), torch.float32)
        return self._in(dtype), tokens.to(dtype), tokens.shape[: tokens.ndim - ends]


class AttentionForm(NamedTuple):
    """Arguments with which `ops.attention`, at scale 1, returns a posterior mean (Z3)."""

    query: Float[Tensor, "B 1 1 D"]
    key: Float[Tensor, "B 1 N D"]
    value: Float[Tensor, "B 1 N E"]
    log_weight: Float[Tensor, "B 1 1 N"]
    batch: torch.Size
    """The batch shape of which B is the product."""

    def attend(self) -> ops.AttentionResult:
        """The attention: output (*batch, E), the posterior mean; log_partition (*batch), what averages leave out."""
        found = ops.attention(self.query, self.key, self.value, log_weight=self.log_weight, scale=1.0)
        return ops.AttentionResult(found.output.reshape(*self.batch, -1), found.log_partition.reshape(self.batch))


def with_prior_token(
    value: Float[Tensor, "*batch d"],
    strength: Float[Tensor, "*batch"],
    tokens: Float[Tensor, "*batch n d"],
    log_weight: Float[Tensor, "*batch n"],
) -> AttentionForm:
    """Attention without scores over n + 1 slots: a prior token of this value and logit log(strength), then the tokens."""
    values = torch.cat([value.unsqueeze(-2), tokens], -2).reshape(-1, tokens.shape[-2] + 1, tokens.shape[-1])
    logits = torch.cat([strength.log().unsqueeze(-1), log_weight], -1).reshape(len(values), 1, 1, -1)
    nothing = values.new_zeros(len(values), 1, values.shape[-2], 1)
    return AttentionForm(nothing[:, :, :1], nothing, values.unsqueeze(1), logits, value.shape[:-1])


def check_mask(mask: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Bool[Tensor, "..."]:
    """The mask, True for tokens that are seen, or one of that shape that is True everywhere."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=like.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a boolean tensor, got {told(mask)}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"mask must have shape {shape} (one entry a token), got {tuple(mask.shape)}")
    check_device(tokens=like, mask=mask)
    return mask


def check_numbers(
    shapes: dict[str, tuple[int, ...]], *, positive: tuple[str, ...] = (), **tensors: Tensor
) -> list[Tensor]:
    """The tensors in one dtype of at least float32, once each is a floating-point tensor of its shape, finite and (those
    named) positive."""
    dtype = torch.float32
    check_device(**tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {told(tensor)}")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {tuple(tensor.shape)}")
        if values_are_readable(tensor) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite, got {tensor[~tensor.isfinite()][0].item()}")
        if name in positive and values_are_readable(tensor) and not bool((tensor > 0).all()):
            raise ValueError(f"{name} must be positive, got {tensor.min().item():g}")
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors.values()]
