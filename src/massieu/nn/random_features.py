"""The heads of attention whose kernel is estimated by random features, so that its cost is linear in queries and keys."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu import ops
from massieu.foundation.arguments import choice, whole_number
from massieu.foundation.numerics import logsumexp
from massieu.foundation.transforms import without_autocast
from massieu.nn.heads import Mask, added, per_head, with_positions
from massieu.nn.modules import Number, hold
from massieu.nn.strategy import Heads, HeadsResult, Request, same_for_queries


class _FeatureShares(NamedTuple):
    """The output as a mean over features, Σ_ω share_ω value_ω."""

    share: Float[Tensor, "B H L m"]
    """r_ω, the share of a feature in the denominator: shares sum to one over features."""
    value: Float[Tensor, "B H m E"]
    """v̄_ω, the mean of the values under the feature's weights of keys."""


class _Inputs(NamedTuple):
    """Queries and keys multiplied by √scale, and values, in at least float32."""

    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B H N D"]
    value: Float[Tensor, "B H N E"]


class RandomFeatureHeads(Heads):
    """Performer attention: softmax attention by random features, linear in length (Choromanski et al., 2021; B17).

    The output is Σ_ω φ_ω(q) Σ_n w_n φ_ω(k_n) v_n over the same without v_n. q and k are scaled by √scale, and ω ~ N(0,
    I), one set of `features` a head. With "positive" features φ_ω(x) = exp(ω·x − ½‖x‖²) numerator and denominator are
    estimates of softmax attention's without bias, their ratio one with a bias of the order 1/m. "relu" features φ_ω(x)
    = max(ω·x, 0) do **not** estimate softmax: their kernel is E φ(q)φ(k) = ‖q‖‖k‖(sin θ + (π − θ) cos θ)/2π, θ the
    angle, with a normaliser of its own.

    Time and memory are linear in queries and keys; with `need_weights`, dropout, causality or a mask per query the matrix
    of weights is formed, in float64 and memory L×N; there positive features hold while ω·q and ω·k range over 700 at most.

    A call may ask by `need_log_partition` for the logarithm of the denominator's mean over features, and by `need_variance`
    for the variance of the output summed over its coordinates, by the delta method: m/(m − 1)·Σ_ω r_ω²‖v̄_ω − output‖², r_ω
    the features' shares and v̄_ω their values.

    **That estimate sees the features that were drawn.** Of positive features it holds for ‖q + k‖ ≲ 1; far above, the draws
    nearly always miss what counts, and so does the estimate: `massieu.ops.random_feature_log_partition` has the formula.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention, RandomFeatureHeads
        >>> attention = Attention(4, 2, batch_first=True, heads=RandomFeatureHeads(features=64))
        >>> _, _, log_partition = attention(torch.zeros(1, 3, 4), need_weights=False, need_log_partition=True)
        >>> round(log_partition[0, 0, 0].exp().item(), 3)  # nothing is random at 0
        3.0
    """

    extras = ("log_partition", "variance")
    directions: Float[Tensor, "H m D"]
    scale: Tensor | float | None

    def __init__(
        self,
        *,
        kind: Literal["positive", "relu"] = "positive",
        features: int = 256,
        scale: Number = None,
        seed: int = 0,
    ) -> None:
        """Takes the kind of features, how many a head, and the scale, as for `SoftmaxHeads`.

        Args:
            seed: Seed of the first features. Modules with the same seed start with the same features.
        """
        super().__init__(scale=scale)
        self.kind = choice("kind", kind, "positive", "relu")
        self.features = whole_number("features", features, least=2)
        self.seed = whole_number("seed", seed, least=0)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.num_heads, self.features, self.head_dim, generator=generator, device="cpu")
        hold(self, "directions", drawn, False, device, dtype)

    def redraw(self) -> None:
        """Draw other features, as Performers do from time to time in training."""
        nn.init.normal_(self.directions)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        dtype = torch.promote_types(query.dtype, torch.float32)
        log_weight = request.log_weight
        is_same_for_queries = same_for_queries(request)
        if request.extra == "variance" and not is_same_for_queries:
            raise ValueError(
                "need_variance needs a mask of keys, the same for every query; got is_causal=True or attn_mask"
            )
        with without_autocast(query.device):
            root = self.head_dim**-0.25 if self.scale is None else per_head(self.scale**0.5)
            inputs = _Inputs(query.to(dtype) * root, key.to(dtype) * root, value.to(dtype))
            weights = None
            if request.need_weights or request.dropout or not is_same_for_queries:
                pair_log_weight = with_positions(log_weight, query, key, request.is_causal)
                output, weights, log_partition = self._by_weights(inputs, pair_log_weight, request)
            elif self.kind == "positive":
                output, log_partition = self._by_attention(inputs, log_weight)
            else:
                output, log_partition = self._by_products(inputs, log_weight)
            extra = None
            if request.extra == "log_partition":
                extra = log_partition
            elif request.extra == "variance":
                extra = self._variance(self._feature_shares(inputs, log_weight), output.to(dtype))
        return HeadsResult(output.to(query.dtype), None if weights is None else weights.to(query.dtype), extra)

    def _omega(self, like: Float[Tensor, "B H _ D"]) -> Float[Tensor, "B H m D"]:
        """The features' directions, in the tensor's dtype and once for each item of its batch."""
        return self.directions.to(like.dtype).expand(like.shape[0], -1, -1, -1)

    def _sums(
        self, key: Tensor, value: Tensor, log_weight: Mask | None
    ) -> tuple[Float[Tensor, "B H m E"], Float[Tensor, "B H 1 m"]]:
        """Mean values of each positive feature, and log Σ_n w_n φ_ω(k_n).

        φ_ω(k) = exp(ω·k − ½‖k‖²), so this is attention of the features ω to the keys, with log-weights less ½‖k‖².
        """
        key_log_weight = added(log_weight, -key.square().sum(-1).unsqueeze(-2) / 2)
        attention = ops.attention(self._omega(key), key, value, log_weight=key_log_weight, scale=1.0)
        return attention.output, attention.log_partition.unsqueeze(-2)

    def _by_attention(self, inputs: _Inputs, log_weight: Mask | None) -> tuple[Tensor, Float[Tensor, "B H L"]]:
        """Output and log-partition of positive features: the queries attend to the features, and these to the keys."""
        query = inputs.query
        values, log_sums = self._sums(inputs.key, inputs.value, log_weight)
        attention = ops.attention(query, self._omega(query), values, log_weight=log_sums, scale=1.0)
        # The query's own factor exp(−½‖q‖²), and the mean over features in place of the sum.
        log_partition = attention.log_partition - query.square().sum(-1) / 2 - math.log(self.features)
        return attention.output, log_partition

    def _relu_features(self, query: Tensor, key: Tensor) -> tuple[Float[Tensor, "B H L m"], Float[Tensor, "B H N m"]]:
        """The features max(ω·x, 0) of queries and of keys."""
        omega = self._omega(query).mT
        return torch.relu(query @ omega), torch.relu(key @ omega)

    def _weighted_relu_features(
        self, query: Tensor, key: Tensor, log_weight: Mask | None
    ) -> tuple[Float[Tensor, "B H L m"], Float[Tensor, "B H N m"]]:
        """The same, with the keys' features multiplied by the weights of the keys."""
        query_features, key_features = self._relu_features(query, key)
        key_weights = added(log_weight, key.new_zeros(key.shape[:-1]).unsqueeze(-2)).exp().mT
        return query_features, key_features * key_weights

    def _by_products(self, inputs: _Inputs, log_weight: Mask | None) -> tuple[Tensor, Float[Tensor, "B H L"]]:
        """Output and log-partition of ReLU features: sums over the keys first, then products with the queries' features."""
        query_features, key_features = self._weighted_relu_features(inputs.query, inputs.key, log_weight)
        total = (query_features @ key_features.sum(-2).unsqueeze(-1)).squeeze(-1)
        numerator = query_features @ (key_features.mT @ inputs.value)
        output = numerator / torch.where(total > 0, total, 1.0).unsqueeze(-1)
        return output, (total / self.features).log()

    def _by_weights(
        self, inputs: _Inputs, log_weight: Mask | None, request: Request
    ) -> tuple[Tensor, Float[Tensor, "B H L N"], Float[Tensor, "B H L"]]:
        """Output, weights and log-partition through the matrix of the kernel.

        In float64 and, for positive features, in logarithms: the keys that a causal query sees may have a small part of the
        weight of all keys, which sets the scale of the features.
        """
        query = inputs.query.double()
        key = inputs.key.double()
        if self.kind == "relu":
            query_features, key_features = self._relu_features(query, key)
            kernel = query_features @ key_features.mT / self.features
            kernel = kernel * added(log_weight, torch.zeros_like(kernel)).exp()
            total = kernel.sum(-1, keepdim=True)
            weights = kernel / torch.where(total > 0, total, 1.0)
            log_partition = total.log()
        else:
            scores = added(log_weight, self._log_positive_kernel(query, key))
            log_partition = logsumexp(scores).unsqueeze(-1)
            # For a query that sees no key, −∞ − 0 gives weights of 0, where −∞ + ∞ would be NaN.
            weights = (scores - log_partition.masked_fill(log_partition == -torch.inf, 0.0)).exp()
        output = request.dropped(weights) @ inputs.value.double()
        return output, weights, log_partition.squeeze(-1).to(inputs.value.dtype)

    def _log_positive_kernel(self, query: Tensor, key: Tensor) -> Float[Tensor, "B H L N"]:
        """log of mean_ω φ_ω(q) φ_ω(k), for positive features."""
        omega = self._omega(query).mT
        query_exponents = query @ omega
        key_exponents = key @ omega
        # Each row's largest exponent is taken out before exp and added back to the logarithm: nothing overflows.
        query_largest = query_exponents.amax(-1, keepdim=True).detach()
        key_largest = key_exponents.amax(-1, keepdim=True).detach()
        query_features = (query_exponents - query_largest).exp()
        key_features = (key_exponents - key_largest).exp()
        # A product below the least number has a finite logarithm, and with it a gradient.
        product = (query_features @ key_features.mT).clamp_min(torch.finfo(torch.float64).tiny) / self.features
        query_shift = query_largest - query.square().sum(-1, keepdim=True) / 2
        key_shift = key_largest - key.square().sum(-1, keepdim=True) / 2
        return product.log() + query_shift + key_shift.mT

    def _feature_shares(self, inputs: _Inputs, log_weight: Mask | None) -> _FeatureShares:
        if self.kind == "positive":
            values, log_sums = self._sums(inputs.key, inputs.value, log_weight)
            scores = inputs.query @ self._omega(inputs.query).mT + log_sums
            # Without a visible key all scores are −∞ and softmax gives NaN: shares are 0 there.
            return _FeatureShares(torch.where(scores > -torch.inf, torch.softmax(scores, -1), 0.0), values)
        query_features, key_features = self._weighted_relu_features(inputs.query, inputs.key, log_weight)
        sums = key_features.sum(-2).unsqueeze(-2)
        numerator = query_features * sums
        total = numerator.sum(-1, keepdim=True)
        values = key_features.mT @ inputs.value / torch.where(sums > 0, sums, 1.0).mT
        return _FeatureShares(numerator / torch.where(total > 0, total, 1.0), values)

    def _variance(self, shares: _FeatureShares, output: Tensor) -> Float[Tensor, "B H L"]:
        """m/(m − 1)·Σ_ω r_ω²‖v̄_ω − output‖², with the square multiplied out: no tensor (L, m, E) is formed."""
        squares = shares.share.square()
        total = (
            squares @ shares.value.square().sum(-1, keepdim=True)
            - 2 * ((squares @ shares.value) * output).sum(-1, keepdim=True)
            + squares.sum(-1, keepdim=True) * output.square().sum(-1, keepdim=True)
        ).squeeze(-1)
        # Rounding may leave a small negative number.
        return total.clamp_min(0.0) * self.features / (self.features - 1)
