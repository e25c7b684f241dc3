"""Posteriors of finitely many concepts and of the probabilities of categories (Z3.4, Z3.3)."""

from collections.abc import Callable
from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from massieu.measures import stable
from massieu.measures.value import values_are_readable
from massieu.posteriors.arguments import check_device, check_log_probabilities, told
from massieu.posteriors.base import AttentionForm, Posterior, check_mask, check_numbers, with_prior_token

LogLikelihood = Float[Tensor, "*batch K V"] | Callable[[Tensor], Float[Tensor, "*tokens K"]]
"""log p(token | concept): a table whose last dimension tokens index, or a function of tokens."""


class DiscreteLatent(Posterior):
    """One of K concepts made all tokens, independently given it: P(z | X) = softmax(log π_z + Σ log p(x | z)) (Z3.4).

    A function as `log_likelihood` takes tokens of shape (*batch, n, …) or (*batch, *query, …) and appends a last
    dimension K to what precedes its own event dimensions. What it returns for masked tokens is dropped.

    Attributes:
        log_weight: log P(z | tokens seen), normalised, shape (*batch, K).
        log_likelihood: The table (*batch, K, V), entries −inf for what a concept never emits, or the function.
        log_evidence: log-probability of the tokens seen, shape (*batch).
    """

    log_weight: Float[Tensor, "*batch K"]
    log_likelihood: LogLikelihood
    log_evidence: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, log_weight: Float[Tensor, "*batch K"], log_likelihood: LogLikelihood) -> Self:
        """The prior with these log-weights, which are normalised here (−inf leaves a concept out).

        Args:
            log_weight: Below +inf, not all −inf.
            log_likelihood: A table of shape (*batch, K, V) or (K, V), or a function.

        Raises:
            ValueError: shapes that do not fit, NaN or +inf, no concept of positive weight.
            TypeError: not floating-point tensors, a log-likelihood that is neither tensor nor callable.
        """
        check_log_weight(log_weight)
        log_weight = log_weight.to(torch.promote_types(log_weight.dtype, torch.float32))
        log_likelihood, dtype = read_log_likelihood(log_likelihood, log_weight)
        log_weight = torch.log_softmax(log_weight.to(dtype), -1)
        return cls(log_weight, log_likelihood, log_weight.new_zeros(log_weight.shape[:-1]))

    @property
    def mean(self) -> Float[Tensor, "*batch K"]:
        """The concepts' probabilities, the mean of z as a one-hot vector."""
        return self.log_weight.exp()

    @property
    def covariance(self) -> Float[Tensor, "*batch K K"]:
        """Of z as a one-hot vector: diag(p) − ppᵀ."""
        return torch.diag_embed(self.mean) - self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)

    def posterior(
        self, tokens: Shaped[Tensor, "..."], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> "DiscreteLatent":
        law, pooled = self._pool(tokens, mask)
        joint, gain = law._joint(pooled)
        return DiscreteLatent(joint - gain.unsqueeze(-1), law.log_likelihood, law.log_evidence + gain)

    def log_predictive(self, token: Shaped[Tensor, "..."]) -> Float[Tensor, "*batch_query"]:
        law, found = emitted_once(self, self.log_likelihood, self.log_weight, token)
        return stable.logsumexp(law.log_weight + found)

    def as_attention(
        self,
        tokens: Shaped[Tensor, "..."],
        mask: Bool[Tensor, "*batch n"] | None = None,
        *,
        values: Float[Tensor, "K E"] | None = None,
    ) -> AttentionForm:
        """The attention over concepts whose output is E[values_z | X], the probabilities by default (Z3.4).

        Its query is the log-likelihoods averaged over tokens, as uniform attention averages them, times their number: the
        average alone loses the count. Its log-partition is the log-evidence of these tokens.

        Raises:
            ValueError, TypeError: as `posterior`.
        """
        law, pooled = self._pool(tokens, mask)
        law._joint(pooled)
        batch, count = pooled.shape[:-1], pooled.shape[-1]
        if values is not None and not (isinstance(values, Tensor) and values.is_floating_point()):
            raise TypeError(f"values must be a floating-point tensor, got {told(values)}")
        if values is not None and (values.ndim != 2 or len(values) != count):
            raise ValueError(f"values must have shape {(count, 'E')}, one row a concept, got {tuple(values.shape)}")
        if values is not None:
            pooled = pooled.to(torch.promote_types(pooled.dtype, values.dtype))
        possible = pooled > -torch.inf
        flat = torch.where(possible, pooled, 0.0).reshape(-1, 1, 1, count)
        logits = torch.where(possible, law.log_weight.to(flat.dtype), -torch.inf).reshape(-1, 1, 1, count)
        key = torch.eye(count, dtype=flat.dtype, device=flat.device).expand(len(flat), 1, count, count)
        value = key if values is None else values.to(flat.dtype).expand(len(flat), 1, *values.shape)
        return AttentionForm(flat, key, value, logits, batch)

    def _pool(self, tokens: Tensor, mask: Tensor | None) -> tuple["DiscreteLatent", Tensor]:
        """The law, spread, and L times the average of the visible tokens' log-likelihoods."""
        law, found = emitted(self, self.log_likelihood, self.log_weight, tokens, mask)
        return law, found.sum(-2)

    def _joint(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """log P(z, tokens | tokens before), and log p(tokens | tokens before)."""
        joint = self.log_weight + pooled
        gain = stable.logsumexp(joint)
        if values_are_readable(gain) and bool((gain == -torch.inf).any()):
            raise ValueError("tokens must be possible under a concept, got a sequence that every concept rules out")
        return joint, gain


class DirichletMultinomial(Posterior):
    """Probabilities of V categories from a Dirichlet law, and tokens from the categories: P(next = j) = α_j/Σα (Z3.3).

    The mean is attention over one-hot tokens and a prior token of value α/Σα and logit log Σα.

    Attributes:
        concentration: α, the prior's plus the counts, shape (*batch, V).
        log_evidence: log-probability of the sequence seen, shape (*batch).
    """

    concentration: Float[Tensor, "*batch V"]
    log_evidence: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, concentration: Float[Tensor, "*batch V"]) -> Self:
        """The prior Dirichlet(concentration).

        Raises:
            ValueError: a concentration that is not positive and finite, or without a dimension.
            TypeError: not a floating-point tensor.
        """
        if isinstance(concentration, Tensor) and concentration.ndim == 0:
            raise ValueError("concentration must have shape (*batch, V), got a single number")
        shape = {"concentration": tuple(concentration.shape) if isinstance(concentration, Tensor) else ()}
        (concentration,) = check_numbers(shape, positive=("concentration",), concentration=concentration)
        return cls(concentration, concentration.new_zeros(concentration.shape[:-1]))

    @property
    def mean(self) -> Float[Tensor, "*batch V"]:
        """The posterior mean of the probabilities, which is the predictive law."""
        return self.concentration / self.concentration.sum(-1, keepdim=True)

    @property
    def covariance(self) -> Float[Tensor, "*batch V V"]:
        """Of the probabilities: (diag(m) − mmᵀ)/(Σα + 1)."""
        mean, total = self.mean, self.concentration.sum(-1)[..., None, None]
        return (torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)) / (total + 1)

    def posterior(
        self, tokens: Int[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> "DirichletMultinomial":
        law, index, seen = self._read(tokens, mask)
        # In float64: a gain of the order of one is the difference of terms of the order of the count.
        before = law.concentration.double()
        counts = torch.zeros_like(before).scatter_add(-1, index, seen.double())
        after = before + counts
        gain = (after.lgamma() - before.lgamma()).sum(-1) + before.sum(-1).lgamma() - after.sum(-1).lgamma()
        dtype = law.concentration.dtype
        return DirichletMultinomial(after.to(dtype), (law.log_evidence.double() + gain).to(dtype))

    def log_predictive(self, token: Int[Tensor, "*batch_query"]) -> Float[Tensor, "*batch_query"]:
        index = check_categories(token, self.concentration.shape[-1])
        self._check_device("token", index)
        law = self._spread(index.shape)
        chosen = law.concentration.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return chosen.log() - law.concentration.sum(-1).log()

    def as_attention(
        self, tokens: Int[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> AttentionForm:
        """The attention whose output is the posterior's mean and whose log-partition is log Σα (Z3.3).

        Raises:
            ValueError, TypeError: as `posterior`.
        """
        law, index, seen = self._read(tokens, mask)
        shown = F.one_hot(index, law.concentration.shape[-1]).to(law.concentration.dtype)
        logits = torch.where(seen, torch.zeros_like(shown[..., 0]), -torch.inf)
        return with_prior_token(law.mean, law.concentration.sum(-1), shown, logits)

    def _read(self, tokens: Tensor, mask: Tensor | None) -> tuple["DirichletMultinomial", Tensor, Tensor]:
        """The law, spread, the tokens, 0 where they are masked, and which are seen."""
        if isinstance(tokens, Tensor):
            self._check_device("tokens", tokens)
        seen = check_mask(mask, tuple(tokens.shape) if isinstance(tokens, Tensor) else (), self.concentration)
        size = self.concentration.shape[-1]
        index = check_categories(tokens, size, seen)
        if index.ndim == 0:
            raise ValueError("DirichletMultinomial needs tokens of shape (*batch, n), got a single number")
        return self._spread(index.shape[:-1]), index, seen


def check_categories(tokens: object, size: int, seen: Tensor | None = None) -> Int[Tensor, "..."]:
    """The tokens as indices into `size` categories, 0 where they are not seen."""
    kinds = isinstance(tokens, Tensor) and not (tokens.is_floating_point() or tokens.is_complex())
    if not isinstance(tokens, Tensor) or not kinds or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be a tensor of whole numbers, got {told(tokens)}")
    index = tokens.long() if seen is None else torch.where(seen, tokens.long(), 0)
    if values_are_readable(index) and not bool(((index >= 0) & (index < size)).all()):
        wrong = index[(index < 0) | (index >= size)][0].item()
        raise ValueError(f"tokens must lie between 0 and {size - 1}, got {wrong}")
    return index


def check_log_weight(log_weight: object, name: str = "log_weight") -> None:
    """Floating-point log-weights (*batch, K), below +inf, some of each batch item finite."""
    if not isinstance(log_weight, Tensor) or not log_weight.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {told(log_weight)}")
    if log_weight.ndim == 0 or log_weight.shape[-1] == 0:
        raise ValueError(f"{name} must have shape (*batch, K) with K ≥ 1, got {tuple(log_weight.shape)}")
    if values_are_readable(log_weight):
        if not bool((log_weight < torch.inf).all()):
            raise ValueError(f"{name} must be finite or −inf, got NaN or +inf")
        if not bool((log_weight > -torch.inf).any(-1).all()):
            raise ValueError(f"{name} must have an entry above −inf in each row, got a row of −inf")


def read_log_likelihood(given: LogLikelihood, log_weight: Tensor) -> tuple[LogLikelihood, torch.dtype]:
    """The table expanded to the batch, or the function; and the dtype to work in."""
    if not isinstance(given, Tensor):
        if not callable(given):
            raise TypeError(f"log_likelihood must be a tensor or a function, got {told(given)}")
        return given, log_weight.dtype
    check_log_weight(given, "log_likelihood")
    batch, count = log_weight.shape[:-1], log_weight.shape[-1]
    if given.ndim < 2 or given.shape[-2] != count or (given.ndim > 2 and given.shape[:-2] != batch):
        needed = f"{(*batch, count, 'V')} or {(count, 'V')}"
        raise ValueError(f"log_likelihood must have shape {needed}, got {tuple(given.shape)}")
    dtype = torch.promote_types(given.dtype, log_weight.dtype)
    return given.to(dtype).expand(*batch, *given.shape[-2:]), dtype


def log_likelihoods(
    source: LogLikelihood, tokens: Tensor, log_weight: Tensor, mask: Tensor | None = None
) -> Float[Tensor, "*tokens K"]:
    """log p(token | concept) at every token, by table or function. What a masked token indexes is not looked at."""
    count = log_weight.shape[-1]
    if isinstance(source, Tensor):
        seen = None if mask is None else check_mask(mask, tuple(tokens.shape), tokens)
        if isinstance(tokens, Tensor):
            check_device(log_likelihood=source, tokens=tokens)
        index = check_categories(tokens, source.shape[-1], seen)
        batch = source.shape[:-2]
        if index.shape[: len(batch)] != batch:
            raise ValueError(
                f"tokens must have shape {(*batch, '…')} for laws of batch shape {tuple(batch)}, got {tuple(tokens.shape)}"
            )
        flat = index.reshape(*batch, 1, -1).expand(*batch, count, -1)
        return source.gather(-1, flat).mT.reshape(*index.shape, count)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {told(tokens)}")
    found = source(tokens)
    if not isinstance(found, Tensor) or found.ndim == 0 or found.shape[-1] != count:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"log_likelihood must return shape (*tokens, {count}), one entry a concept; got {shape}")
    return found.to(torch.promote_types(found.dtype, log_weight.dtype))


Law = TypeVar("Law", bound=Posterior)


def emitted(
    law: Law, source: LogLikelihood, log_weight: Tensor, tokens: Tensor, mask: Tensor | None
) -> tuple[Law, Float[Tensor, "*batch n K"]]:
    """The law, spread to the tokens' batch, and the tokens' log-likelihoods, 0 where they are masked."""
    found = log_likelihoods(source, tokens, log_weight, mask)
    if found.ndim < 2:
        raise ValueError(f"{type(law).__name__} needs tokens of shape (*batch, n, …), got {tuple(tokens.shape)}")
    seen = check_mask(mask, tuple(found.shape[:-1]), found)
    found = torch.where(seen.unsqueeze(-1), found, 0.0)
    check_log_probabilities(log_likelihood=found)
    return law._in(torch.promote_types(found.dtype, log_weight.dtype))._spread(found.shape[:-2]), found


def emitted_once(
    law: Law, source: LogLikelihood, log_weight: Tensor, token: Tensor
) -> tuple[Law, Float[Tensor, "*batch_query K"]]:
    """The law, spread to the queries, and their log-likelihoods."""
    found = log_likelihoods(source, token, log_weight)
    check_log_probabilities(log_likelihood=found)
    return law._in(torch.promote_types(found.dtype, log_weight.dtype))._spread(found.shape[:-1]), found
