"""Layers of tokens that are drawn, not averaged: attention as sequential Monte Carlo (S19, E5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu import ops
from massieu.measures import Gaussian, MissingFormError
from massieu.ops.resampling import Method
from massieu.population.arguments import need_finite, need_tensors, need_values
from massieu.population.head import Head
from massieu.population.operator import AffineMap
from massieu.population.reading import ObservableReading


class ResampledTokens(NamedTuple):
    """What a `ResampledLayer` drew."""

    particles: Float[Tensor, "*batch n d"]
    ancestors: Int[Tensor, "*batch n"] | None
    """Which token each is a draw of; None where each is the mean of several draws."""
    effective_size: Float[Tensor, "*batch n"]
    """1/Σ_j P_ij² of each query, between 1 and n."""
    offspring: Float[Tensor, "*batch n"]
    """Σ_i P_ij: how many draws of each token are expected."""

    def readings(self) -> Mapping[str, ObservableReading]:
        """As a flow records them: the mean effective size, and quantiles of the offspring, from least to largest."""
        quantiles = torch.linspace(0, 1, 11, dtype=torch.float64, device=self.offspring.device)
        ordered = self.offspring.double().flatten().sort().values
        place = (quantiles * (len(ordered) - 1)).round().long()
        return {
            "effective_size": ObservableReading(self.effective_size.double().mean()),
            "offspring": ObservableReading(ordered[place]),
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class ResampledLayer(Head):
    """Each token i is replaced by a value v_J drawn with J ~ P_i, attention's weights: attention is its mean (S19).

    Of the mean of S draws the expectation is attention's output and the covariance Cov_P(v)/S, so that draws grow into
    attention; `attended` is that limit. In a `Flow`, the effective size, the offspring and, for one draw a token, the
    coalescence of lineages are recorded too.

    Attributes:
        query, key, value, scale: Of the one head; no map: the tokens as they are.
        step_size, residual, contraction: As in `AttentionLayer`; by default the draw replaces the token.
        generator: Source of the draws; each call goes on with it.
        draws: S, the draws a token becomes the mean of.
        method: "multinomial", or "systematic", as in `massieu.ops.resample_attention`.
    """

    generator: torch.Generator
    draws: int = 1
    method: Method = "multinomial"

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The tokens after the layer, at least float32; raises as `massieu.ops.resample_attention`."""
        return self.observed(particles).particles

    def observed(self, particles: Float[Tensor, "*batch n d"]) -> ResampledTokens:
        """The tokens after the layer, and what was drawn.

        Raises:
            ValueError: particles with a NaN or an infinity, which have no law to draw from; or as the call.
        """
        need_tensors(particles=particles)
        need_values(particles=particles)
        need_finite(particles=particles)
        query, key, value = self.heads(particles)
        drawn = ops.resample_attention(
            query, key, value, generator=self.generator, draws=self.draws, method=self.method, scale=self.scale
        )
        lead = particles.shape[:-1]
        ancestors = drawn.indices.reshape(lead) if self.draws == 1 else None
        return ResampledTokens(
            self.moved(particles, drawn.sample.mean(-2)),
            ancestors,
            drawn.effective_size.reshape(lead),
            drawn.offspring.reshape(lead),
        )

    def attended(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The same with attention in place of the draws: for no contraction their expectation."""
        query, key, value = self.heads(particles)
        return self.moved(particles, ops.attention(query, key, value, scale=self.scale).output)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The law after the layer, of infinitely many particles of that law: attention's, and the covariance of the draws.

        Over a Gaussian law a draw is Gaussian too, of covariance VCVᵀ wherever the query is (S19, S20).

        Raises:
            MissingFormError: several systematic draws, whose mean has no such law; a contraction that is not affine.
            ValueError, TypeError: maps for other dimensions, or another measure.
        """
        if self.draws > 1 and self.method != "multinomial":
            raise MissingFormError(
                f"the mean of {self.draws} {self.method} draws is not Gaussian: they depend on each other; multinomial ones "
                "do not"
            )
        before, tilt, value = self.weighed(law)
        answer = value @ before.covariance
        output = AffineMap(answer @ tilt, (value @ before.mean.unsqueeze(-1)).squeeze(-1))
        return self.law_after(before, output, answer @ value.mT / self.draws)
