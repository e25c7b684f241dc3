"""Filtering of a hidden Markov chain: a latent that moves from token to token, by the forward algorithm in log-space."""

from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from massieu.foundation import numerics
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import any_true
from massieu.posteriors.discrete import EmittingPosterior, LogLikelihood, check_log_weight, log_tables


class PathResult(NamedTuple):
    """Laws of every state of the chain, given a sequence of n tokens."""

    filtered: Float[Tensor, "*batch n K"]
    """log P(state at ℓ | tokens up to ℓ)."""
    smoothed: Float[Tensor, "*batch n K"]
    """log P(state at ℓ | all tokens)."""
    log_predictive: Float[Tensor, "*batch n"]
    """log p(token ℓ | tokens before), 0 where it is masked; their sum is the log-evidence."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class HiddenMarkov(EmittingPosterior):
    """A hidden Markov chain of K states, each of which emits a token. Tokens are not exchangeable: their order counts.

    A masked token is one that was not observed: the chain moves on there. The concept of `log_weight`, of `mean` and of the
    log-likelihoods is the state behind the next token.

    Attributes:
        log_transition: log P(next state j | state i) at [i, j], normalised, shape (*batch, K, K).

    Example:
        >>> import torch
        >>> from massieu.posteriors import HiddenMarkov
        >>> stays = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> chain = HiddenMarkov.create([0.0, 0.0], stays, stays)
        >>> round(chain.posterior(torch.tensor([0, 0])).mean[0].item(), 3)
        0.881
    """

    log_transition: Float[Tensor, "*batch K K"]

    @classmethod
    def create(
        cls, log_weight: Float[Tensor, "*batch K"], log_transition: Float[Tensor, "..."], log_likelihood: LogLikelihood
    ) -> Self:
        """The chain from the log-weights of its first state and of its transitions, normalised here.

        Args:
            log_weight: Below +inf, not all −inf.
            log_transition: Shape (*batch, K, K) or (K, K), row i the log-weights of what follows i, not all −inf.
            log_likelihood: A table of shape (*batch, K, V) or (K, V), or a function.
        """
        log_weight, log_likelihood = log_tables(log_weight, log_likelihood)
        log_transition = check_log_weight("log_transition", log_transition)
        batch = log_weight.shape[:-1]
        count = log_weight.shape[-1]
        if tuple(log_transition.shape) != (count, count) and tuple(log_transition.shape) != (*batch, count, count):
            needed = f"{(*batch, count, count)} or {(count, count)}"
            raise ValueError(f"log_transition must have shape {needed}, got {tuple(log_transition.shape)}")
        law = cls(
            torch.log_softmax(log_weight, -1),
            log_likelihood,
            torch.log_softmax(log_transition.expand(*batch, count, count), -1),
            log_evidence=log_weight.new_zeros(batch),
        )
        return law._promoted()[0]

    def posterior(self, tokens: Shaped[Tensor, "..."], mask: Bool[Tensor, "*batch n"] | None = None) -> "HiddenMarkov":
        law, likelihoods = self._emitted(tokens, mask)
        for likelihood in likelihoods.unbind(-2):
            law, _, _ = law._move(likelihood)
        return law

    def path(self, tokens: Shaped[Tensor, "..."], mask: Bool[Tensor, "*batch n"] | None = None) -> PathResult:
        """Filtered and smoothed laws of every state, by one pass forwards and one backwards: O(nK²).

        Raises:
            ValueError, TypeError: as `posterior`, and for no token at all.
        """
        law, likelihoods = self._emitted(tokens, mask)
        if likelihoods.shape[-2] == 0:
            raise ValueError("a path needs at least one token, got none")
        transition = law.log_transition
        filtered = []
        gains = []
        for likelihood in likelihoods.unbind(-2):
            law, state, gain = law._move(likelihood)
            filtered.append(state)
            gains.append(gain)
        # Backward messages: log p(later tokens | state), up to a constant.
        messages = [torch.zeros_like(filtered[-1])]
        for likelihood in likelihoods[..., 1:, :].flip(-2).unbind(-2):
            message = numerics.logsumexp(transition + (likelihood + messages[-1]).unsqueeze(-2))
            # Normalised over states: their common part would grow with the sequence, and swallow their differences.
            messages.append(numerics.log_softmax(message))
        filtered_states = torch.stack(filtered, -2)
        smoothed = numerics.log_softmax(filtered_states + torch.stack(messages[::-1], -2))
        return PathResult(filtered_states, smoothed, torch.stack(gains, -1))

    def _move(self, likelihood: Tensor) -> tuple["HiddenMarkov", Tensor, Tensor]:
        """The law after a token of these log-likelihoods, the filtered law of the state that emitted it, its log-predictive."""
        joint = self.log_weight + likelihood
        gain = numerics.logsumexp(joint)
        if any_true(gain == -torch.inf):
            raise ValueError("tokens must be possible under the chain, got a sequence of probability zero")
        state = joint - gain.unsqueeze(-1)
        # log Σ_i P(state i) P(next j | i): the sum is over the first of both state dimensions.
        next_state = numerics.logsumexp((state.unsqueeze(-1) + self.log_transition).mT)
        law = HiddenMarkov(next_state, self.log_likelihood, self.log_transition, log_evidence=self.log_evidence + gain)
        return law, state, gain
