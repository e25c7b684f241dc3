"""Layers of tokens that are drawn, not averaged: attention as sequential Monte Carlo (S19, E5)."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import check_finite, check_values, instance, number
from massieu.foundation.values import static_field
from massieu.measures import Gaussian, MissingFormError
from massieu.ops.resampling import Method
from massieu.ops.sharded.collectives import Peers
from massieu.population.background import HybridCarrier
from massieu.population.head import Head, HeadOptions, checked
from massieu.population.operator import AffineMap
from massieu.population.reading import ObservableReading


class ResampledTokens(NamedTuple):
    """What a `ResampledLayer` drew."""

    particles: Float[Tensor, "*batch n d"]
    ancestors: Int[Tensor, "*batch n"] | None
    """Which token each is a draw of; None where each is the mean of several draws, or there is a background."""
    effective_size: Float[Tensor, "*batch n"]
    """1/Σ_j P_ij² of each query, between 1 and n."""
    offspring: Float[Tensor, "*batch n"]
    """Σ_i P_ij: how many draws of each token are expected; of a background too, the last, where there is one."""
    background: Float[Tensor, "*batch n"] | None = None
    """The probability that a draw is a new token of the background; None where there is none."""

    def readings(self) -> Mapping[str, ObservableReading]:
        """As a flow records them: the mean effective size, and quantiles of the offspring, from least to largest."""
        quantiles = torch.linspace(0, 1, 11, dtype=torch.float64, device=self.offspring.device)
        ordered = self.offspring.double().flatten().sort().values
        place = (quantiles * (len(ordered) - 1)).round().long()
        found = {
            "effective_size": ObservableReading(self.effective_size.double().mean()),
            "offspring": ObservableReading(ordered[place]),
        }
        if self.background is not None:
            found["background"] = ObservableReading(self.background.double().mean())
        return found


class ResampledLayer(Head):
    """Resampling in place of averaging: token i becomes a value drawn by its attention weights; attention is the mean (S19).

    Of the mean of S draws the expectation is attention's output and the covariance Cov_P(v)/S, so that draws grow into
    attention; `attended` is that limit. Over a Gaussian law a draw is Gaussian too, of covariance VCVᵀ wherever the query
    is (S19, S20): `gaussian` is attention's law with the covariance of the draws, unless several systematic draws depend
    on each other. In a `Flow`, the effective size, the offspring and, for one draw a token, the coalescence of lineages
    are recorded too.

    With a background the carrier is hybrid, Σ_j δ(x_j) + w·N(m, Σ): under the tilt η_i = scale·KᵀQx_i a draw is a new
    token of N(m + Ση_i, Σ) with probability in proportion to w·exp(m·η_i + ½η_iᵀΣη_i). So resampling does not leave a
    cloud that only repeats itself. Effective size and offspring count the background as one more particle.

    Particles with a NaN or an infinity have no law to draw from: a ValueError. Use `create`.

    Attributes:
        query_weight, key_weight, value_weight, scale: Of the one head; no map: the tokens as they are; k^-½ by default.
        step_size, residual, activation: As in `AttentionLayer`; by default the draw replaces the token.
        generator: Source of the draws; each call goes on with it.
        draws: S, the draws a token becomes the mean of.
        method: "multinomial", or "systematic", as in `massieu.ops.resample_attention`.
        background: N(m, Σ) on tokens, or None.
        background_log_weight: log w, nats: of all its mass, where a token weighs 1.

    Example:
        >>> import torch
        >>> from massieu.population import ResampledLayer
        >>> layer = ResampledLayer.create(generator=torch.Generator(), scale=100.0)  # each token draws itself
        >>> layer(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    generator: torch.Generator = static_field()
    draws: int = static_field()
    method: Method = static_field()
    background: Gaussian | None
    background_log_weight: float = static_field()

    @classmethod
    def create(
        cls,
        *,
        generator: torch.Generator,
        draws: int = 1,
        method: Method = "multinomial",
        background: Gaussian | None = None,
        background_log_weight: float = 0.0,
        **options: Unpack[HeadOptions],
    ) -> Self:
        """A layer that draws from `generator`; `draws` and `method` are checked by the call.

        Raises:
            TypeError: no generator, a background that is no Gaussian, or options of a wrong kind.
            ValueError: a scale, a step size or a log-weight that is not finite; more than one background.
        """
        if background is not None:
            instance("background", background, Gaussian, "a Gaussian")
            if background.batch_shape:
                shape = tuple(background.batch_shape)
                raise ValueError(f"background must be one Gaussian, got a batch of shape {shape}")
        return cls(
            **checked(options),
            generator=instance("generator", generator, torch.Generator, "a torch.Generator"),
            draws=draws,
            method=method,
            background=background,
            background_log_weight=float(number("background_log_weight", background_log_weight)),
        )

    def observed(self, particles: Float[Tensor, "*batch n d"]) -> ResampledTokens:
        """The tokens after the layer, and what was drawn; raises as the call."""
        return self._drawn(self._admitted(particles))

    def attended(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The same with attention in place of the draws: for no activation their expectation."""
        particles = self._admitted(particles)
        if self.background is not None:
            return self._after(particles, self._carrier(particles).mean(self.background, self.value_weight))
        return self._after(particles, ops.attention(*self._heads(particles), scale=self.scale).output)

    def gaussian(self, law: Gaussian) -> Gaussian:
        if self.background is not None:
            raise MissingFormError(
                "draws from a population and a background have a mixture for a law, which is not Gaussian: move particles"
            )
        if self.draws > 1 and self.method != "multinomial":
            raise MissingFormError(
                f"the mean of {self.draws} {self.method} draws is not Gaussian: they depend on each other; multinomial ones "
                "do not"
            )
        before, tilt, value = self._weighed(law)
        answer = value @ before.covariance
        output = AffineMap(answer @ tilt, (value @ before.mean.unsqueeze(-1)).squeeze(-1))
        return self._law_after(before, output, answer @ value.mT / self.draws)

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        return self._drawn(particles).particles

    def _drawn(self, particles: Tensor) -> ResampledTokens:
        check_values(particles=particles)
        check_finite(particles=particles)
        options: dict[str, Any] = {"generator": self.generator, "draws": self.draws, "method": self.method}
        lead = particles.shape[:-1]
        if self.background is not None:
            carrier = self._carrier(particles)
            drawn = carrier.draw(self.background, self.value_weight, **options)
            moved, offspring = self._after(particles, drawn.sample.mean(-2)), drawn.offspring
            told = drawn.effective_size.reshape(lead), offspring.reshape(*lead[:-1], -1)
            return ResampledTokens(moved, None, *told, carrier.share().reshape(lead))
        drawn = ops.resample_attention(*self._heads(particles), scale=self.scale, **options)
        return ResampledTokens(
            self._after(particles, drawn.sample.mean(-2)),
            drawn.indices.reshape(lead) if self.draws == 1 else None,
            drawn.effective_size.reshape(lead),
            drawn.offspring.reshape(lead),
        )

    def _carrier(self, particles: Tensor) -> HybridCarrier:
        assert self.background is not None
        heads = self._heads(particles)
        return HybridCarrier.of(heads, self.key_weight, self.scale, self.background, self.background_log_weight)
