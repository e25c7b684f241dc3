"""Posteriors of finitely many concepts and of the probabilities of categories (Z3.4, Z3.3)."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from massieu.foundation import numerics
from massieu.foundation.arguments import (
    check_log_probabilities,
    check_shape,
    described,
    floating,
    instance,
    integers,
    real_tensor,
)
from massieu.foundation.transforms import all_true, any_true, unwrapped
from massieu.foundation.values import align, need_batch, promoted_dtype
from massieu.posteriors.base import AttentionForm, Posterior, check_mask, numbers, with_sink

LogLikelihood = Float[Tensor, "*batch K V"] | Callable[[Tensor], Float[Tensor, "*tokens K"]]
"""log p(token | concept): a table whose last dimension tokens index, or a function of tokens."""


class EmittingPosterior(Posterior):
    """The law of which of K concepts emits a token, by the log-likelihoods of tokens under each.

    A function as `log_likelihood` takes tokens of shape (*batch, n, …) or (*batch, *query, …) and appends a last
    dimension K to what precedes its own event dimensions. What it returns for masked tokens is dropped.

    Attributes:
        log_weight: log P(concept | tokens seen), normalised, shape (*batch, K).
        log_likelihood: The table (*batch, K, V), entries −inf for what a concept never emits, or the function.
    """

    log_weight: Float[Tensor, "*batch K"]
    log_likelihood: LogLikelihood

    @property
    def mean(self) -> Float[Tensor, "*batch K"]:
        """The concepts' probabilities, the mean of z as a one-hot vector."""
        return self.log_weight.exp()

    def log_predictive(self, token: Shaped[Tensor, "..."]) -> Float[Tensor, "*batch_query"]:
        likelihoods = self._log_likelihoods(token)
        check_log_probabilities(log_likelihood=likelihoods)
        law, likelihoods = self._promoted(likelihoods)
        return numerics.logsumexp(law._spread(likelihoods.shape[:-1]).log_weight + likelihoods)

    def _emitted(self, tokens: Tensor, mask: Tensor | None) -> tuple[Self, Float[Tensor, "*batch n K"]]:
        """The law, spread to the tokens' batch, and the tokens' log-likelihoods, 0 where they are masked."""
        likelihoods = self._log_likelihoods(tokens, mask)
        if likelihoods.ndim < 2:
            raise ValueError(f"{type(self).__name__} needs tokens of shape (*batch, n, …), got {tuple(tokens.shape)}")
        seen = check_mask(mask, likelihoods.shape[:-1], likelihoods)
        likelihoods = torch.where(seen.unsqueeze(-1), likelihoods, 0.0)
        check_log_probabilities(log_likelihood=likelihoods)
        law, likelihoods = self._promoted(likelihoods)
        return law._spread(likelihoods.shape[:-2]), likelihoods

    def _log_likelihoods(self, tokens: Tensor, mask: Tensor | None = None) -> Float[Tensor, "*tokens K"]:
        """log p(token | concept) at every token, by table or function. What a masked token indexes is not looked at."""
        if isinstance(self.log_likelihood, Tensor):
            return self._from_table(self.log_likelihood, tokens, mask)
        instance("tokens", tokens, Tensor, "a tensor")
        if mask is not None and tokens.is_floating_point() and tokens.shape[: mask.ndim] == mask.shape:
            # Before the function, so that a masked NaN does not reach its derivatives either.
            tokens = torch.where(align(mask, tokens.ndim), tokens, 0.0)
        num_concepts = self.log_weight.shape[-1]
        likelihoods = self.log_likelihood(tokens)
        if not isinstance(likelihoods, Tensor) or likelihoods.ndim == 0 or likelihoods.shape[-1] != num_concepts:
            shape = tuple(likelihoods.shape) if isinstance(likelihoods, Tensor) else described(likelihoods)
            raise ValueError(
                f"log_likelihood must return shape (*tokens, {num_concepts}), one entry a concept; got {shape}"
            )
        return likelihoods

    def _from_table(self, table: Tensor, tokens: Tensor, mask: Tensor | None) -> Float[Tensor, "*tokens K"]:
        """The table's columns at the tokens."""
        seen = None if mask is None else check_mask(mask, integers("tokens", tokens).shape, tokens)
        index = check_categories(tokens, table.shape[-1], seen)
        self._check_device(tokens=tokens)
        need_batch(type(self).__name__, "tokens", index.shape, self.batch_shape, ())
        batch = self.batch_shape
        num_concepts = self.log_weight.shape[-1]
        # All tokens of a batch item in one dimension, the same for every concept: (*batch, K, tokens).
        flat = index.reshape(*batch, 1, index.shape[len(batch) :].numel()).expand(*batch, num_concepts, -1)
        return table.gather(-1, flat).mT.reshape(*index.shape, num_concepts)


class DiscreteLatent(EmittingPosterior):
    """One of K concepts generates all tokens, independently: P(z | X) = softmax(log π_z + Σ log p(x | z)) (Z3.4).

    Example:
        >>> import torch
        >>> from massieu.posteriors import DiscreteLatent
        >>> fair_and_bent = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()
        >>> law = DiscreteLatent.create([0.0, 0.0], fair_and_bent).posterior(torch.tensor([0, 0]))
        >>> [round(p, 3) for p in law.mean.tolist()]
        [0.2, 0.8]
    """

    @classmethod
    def create(cls, log_weight: Float[Tensor, "*batch K"], log_likelihood: LogLikelihood) -> Self:
        """The prior with these log-weights, which are normalised here (−inf leaves a concept out).

        Args:
            log_weight: Below +inf, not all −inf.
            log_likelihood: A table of shape (*batch, K, V) or (K, V), or a function.
        """
        log_weight, log_likelihood = log_tables(log_weight, log_likelihood)
        log_weight = torch.log_softmax(log_weight, -1)
        return cls(log_weight, log_likelihood, log_evidence=log_weight.new_zeros(log_weight.shape[:-1]))

    @property
    def covariance(self) -> Float[Tensor, "*batch K K"]:
        """The covariance of z as a one-hot vector, diag(p) − ppᵀ."""
        return torch.diag_embed(self.mean) - self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)

    def posterior(
        self, tokens: Shaped[Tensor, "..."], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> "DiscreteLatent":
        law, _, joint, gain = self._read(tokens, mask)
        return DiscreteLatent(joint - gain.unsqueeze(-1), law.log_likelihood, log_evidence=law.log_evidence + gain)

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
        """
        law, pooled, _, _ = self._read(tokens, mask)
        batch = pooled.shape[:-1]
        count = pooled.shape[-1]
        if values is not None:
            check_shape("values", floating("values", values), (count, "E"))
            pooled = pooled.to(torch.promote_types(pooled.dtype, values.dtype))
        # A query must be finite: concepts that are ruled out are left out by their log-weight.
        possible = pooled > -torch.inf
        query = torch.where(possible, pooled, 0.0).reshape(-1, 1, 1, count)
        logits = torch.where(possible, law.log_weight.to(query.dtype), -torch.inf).reshape(-1, 1, 1, count)
        key = torch.eye(count, dtype=query.dtype, device=query.device).expand(len(query), 1, count, count)
        value = key if values is None else values.to(query.dtype).expand(len(query), 1, *values.shape)
        return AttentionForm(query, key, value, logits, batch)

    def _read(self, tokens: Tensor, mask: Tensor | None) -> tuple["DiscreteLatent", Tensor, Tensor, Tensor]:
        """The law, spread; the visible tokens' log-likelihoods, summed; log P(z, tokens | tokens before); its sum over z."""
        law, likelihoods = self._emitted(tokens, mask)
        pooled = likelihoods.sum(-2)
        joint = law.log_weight + pooled
        gain = numerics.logsumexp(joint)
        if any_true(gain == -torch.inf):
            raise ValueError("tokens must be possible under a concept, got a sequence that every concept rules out")
        return law, pooled, joint, gain


class DirichletMultinomial(Posterior):
    """Unknown probabilities of V categories with a Dirichlet prior, and categorical tokens: P(next = j) = α_j/Σα (Z3.3).

    The mean is attention over one-hot tokens and a sink of value α/Σα and logit log Σα.

    Attributes:
        concentration: α, the prior's plus the counts, shape (*batch, V).

    Example:
        >>> import torch
        >>> from massieu.posteriors import DirichletMultinomial
        >>> DirichletMultinomial.create([1.0, 1.0]).posterior(torch.tensor([0, 0])).mean.tolist()
        [0.75, 0.25]
    """

    concentration: Float[Tensor, "*batch V"]

    @classmethod
    def create(cls, concentration: Float[Tensor, "*batch V"]) -> Self:
        """The prior Dirichlet(concentration), which is positive."""
        (concentration,) = numbers(1, ("concentration",), concentration=concentration)
        return cls(concentration, log_evidence=concentration.new_zeros(concentration.shape[:-1]))

    @property
    def mean(self) -> Float[Tensor, "*batch V"]:
        """The posterior mean of the probabilities, which is the predictive law."""
        return self.concentration / self.concentration.sum(-1, keepdim=True)

    @property
    def covariance(self) -> Float[Tensor, "*batch V V"]:
        """The covariance of the probabilities, (diag(m) − mmᵀ)/(Σα + 1)."""
        mean = self.mean
        total = self.concentration.sum(-1)[..., None, None]
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
        return DirichletMultinomial(after.to(dtype), log_evidence=(law.log_evidence.double() + gain).to(dtype))

    def log_predictive(self, token: Int[Tensor, "*batch_query"]) -> Float[Tensor, "*batch_query"]:
        index = check_categories(token, self.concentration.shape[-1])
        need_batch(type(self).__name__, "token", index.shape, self.batch_shape, ())
        self._check_device(token=index)
        law = self._promoted()[0]._spread(index.shape)
        chosen = law.concentration.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return chosen.log() - law.concentration.sum(-1).log()

    def as_attention(
        self, tokens: Int[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None
    ) -> AttentionForm:
        """The attention whose output is the posterior's mean and whose log-partition is log Σα (Z3.3)."""
        law, index, seen = self._read(tokens, mask)
        one_hot = F.one_hot(index, law.concentration.shape[-1]).to(law.concentration.dtype)
        logits = torch.where(seen, torch.zeros_like(one_hot[..., 0]), -torch.inf)
        return with_sink(law.mean, law.concentration.sum(-1), one_hot, logits)

    def _read(self, tokens: Tensor, mask: Tensor | None) -> tuple["DirichletMultinomial", Tensor, Tensor]:
        """The law, spread, the tokens, 0 where they are masked, and which are seen."""
        self._check_device(tokens=integers("tokens", tokens))
        seen = check_mask(mask, tokens.shape, tokens)
        index = check_categories(tokens, self.concentration.shape[-1], seen)
        need_batch(type(self).__name__, "tokens", index.shape, self.batch_shape, ("n",))
        return self._promoted()[0]._spread(index.shape[:-1]), index, seen


def check_categories(tokens: Tensor, size: int, seen: Tensor | None = None) -> Int[Tensor, "..."]:
    """The tokens as indices into `size` categories, 0 where they are not seen."""
    index = integers("tokens", tokens).long()
    if seen is not None:
        index = torch.where(seen, index, 0)
    in_range = (index >= 0) & (index < size)
    if not all_true(in_range):
        wrong = unwrapped(torch.where(in_range, 0, index))
        raise ValueError(f"tokens must lie between 0 and {size - 1}, got {wrong[wrong != 0][0].item()}")
    return index


def log_tables(log_weight: Any, log_likelihood: LogLikelihood) -> tuple[Tensor, LogLikelihood]:
    """Checked log-weights, and the table expanded to their batch, both in one dtype; or the function as it is."""
    log_weight = check_log_weight("log_weight", log_weight)
    if callable(log_likelihood) and not isinstance(log_likelihood, Tensor):
        return log_weight, log_likelihood
    table = check_log_weight("log_likelihood", log_likelihood)
    batch = log_weight.shape[:-1]
    count = log_weight.shape[-1]
    if table.ndim < 2 or table.shape[-2] != count or (table.ndim > 2 and table.shape[:-2] != batch):
        needed = f"{(*batch, count, 'V')} or {(count, 'V')}"
        raise ValueError(f"log_likelihood must have shape {needed}, got {tuple(table.shape)}")
    dtype = torch.promote_types(table.dtype, log_weight.dtype)
    return log_weight.to(dtype), table.to(dtype).expand(*batch, *table.shape[-2:])


def check_log_weight(name: str, value: Any) -> Float[Tensor, "*batch K"]:
    """The log-weights in at least float32; or an error unless they are below +inf and not all −inf in any row."""
    tensor = real_tensor(name, value)
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"{name} must have shape (*batch, K) with K ≥ 1, got {tuple(tensor.shape)}")
    check_log_probabilities(**{name: tensor})
    if not all_true((tensor > -torch.inf).any(-1)):
        raise ValueError(f"{name} must have an entry above −inf in each row, got a row of −inf")
    return tensor.to(promoted_dtype(tensor))
