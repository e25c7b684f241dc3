"""A layer that draws values in place of averaging them: attention as sequential Monte Carlo (S19, E5)."""

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
    """The tokens after a `ResampledLayer`, and its draws."""

    particles: Float[Tensor, "*batch n d"]
    ancestors: Int[Tensor, "*batch n"] | None
    """The token that each one is a draw of; None for means of several draws, and with a background."""
    effective_size: Float[Tensor, "*batch n"]
    """1/Σ_j P_ij² of each query, between 1 and n."""
    offspring: Float[Tensor, "*batch n"]
    """Σ_i P_ij: the expected number of draws of each token; with a background one entry more, the last, for it."""
    background: Float[Tensor, "*batch n"] | None = None
    """The probability that a draw is a new token of the background; None without one."""

    def readings(self) -> Mapping[str, ObservableReading]:
        """What a flow records: the mean effective size, and eleven quantiles of the offspring, from smallest to largest."""
        levels = torch.linspace(0, 1, 11, dtype=torch.float64, device=self.offspring.device)
        ordered = self.offspring.double().flatten().sort().values
        positions = (levels * (len(ordered) - 1)).round().long()
        readings = {
            "effective_size": ObservableReading(self.effective_size.double().mean()),
            "offspring": ObservableReading(ordered[positions]),
        }
        if self.background is not None:
            readings["background"] = ObservableReading(self.background.double().mean())
        return readings


class ResampledLayer(Head):
    """Resampling in place of averaging: token i becomes a value drawn by its attention weights; attention is the mean (S19).

    The mean of S draws has attention's output as its expectation and the covariance Cov_P(v)/S. It converges to attention as
    S grows; `attended` is that limit. Over a Gaussian law a draw is Gaussian too, of covariance VCVᵀ for every query (S19,
    S20): `gaussian` is attention's law with the covariance of the draws added. For several systematic draws, which depend on
    each other, it is not known. A `Flow` also records effective size, offspring and, for one draw a token, the coalescence
    of lineages.

    With a background the carrier is hybrid, Σ_j δ(x_j) + w·N(m, Σ). Under the tilt η_i = scale·KᵀQx_i a draw is a new token
    of N(m + Ση_i, Σ) with probability in proportion to w·exp(m·η_i + ½η_iᵀΣη_i), so that the cloud does not end as copies of
    a few tokens. Effective size and offspring count the background as one more particle.

    Particles with a NaN or an infinity have no law to draw from and are a ValueError. Use `create`.

    Attributes:
        query_weight, key_weight, value_weight: Matrices of the one head; None: the tokens as they are.
        scale: Inverse temperature; None: k^-½.
        step_size, residual, activation: As in `AttentionLayer`; by default the draw replaces the token.
        generator: Source of the draws; each call advances it.
        draws: S; a token becomes the mean of this many draws.
        method: "multinomial", or "systematic", as in `massieu.ops.resample_attention`.
        background: N(m, Σ) on tokens, or None.
        background_log_weight: log w, nats: the background's whole mass, in units of one token.

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
        """The tokens after attention in place of the draws; without an activation this is the expectation of the draws."""
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
        before, tilt, value = self._matrices(law)
        # The tilted law of keys is N(m + Cη, C): its mean of values is affine in the query, its covariance is constant.
        value_covariance = value @ before.covariance
        output = AffineMap(value_covariance @ tilt, (value @ before.mean.unsqueeze(-1)).squeeze(-1))
        return self._law_after(before, output, value_covariance @ value.mT / self.draws)

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        return self._drawn(particles).particles

    def _drawn(self, particles: Tensor) -> ResampledTokens:
        check_values(particles=particles)
        check_finite(particles=particles)
        options: dict[str, Any] = {"generator": self.generator, "draws": self.draws, "method": self.method}
        *batch, n, _ = particles.shape
        if self.background is not None:
            carrier = self._carrier(particles)
            drawn = carrier.draw(self.background, self.value_weight, **options)
            return ResampledTokens(
                self._after(particles, drawn.sample.mean(-2)),
                ancestors=None,
                effective_size=drawn.effective_size.reshape(*batch, n),
                offspring=drawn.offspring.reshape(*batch, n + 1),
                background=carrier.share().reshape(*batch, n),
            )
        drawn = ops.resample_attention(*self._heads(particles), scale=self.scale, **options)
        return ResampledTokens(
            self._after(particles, drawn.sample.mean(-2)),
            ancestors=drawn.indices.reshape(*batch, n) if self.draws == 1 else None,
            effective_size=drawn.effective_size.reshape(*batch, n),
            offspring=drawn.offspring.reshape(*batch, n),
        )

    def _carrier(self, particles: Tensor) -> HybridCarrier:
        assert self.background is not None
        query_key_value = self._heads(particles)
        return HybridCarrier.of(
            query_key_value, self.key_weight, self.scale, self.background, self.background_log_weight
        )
