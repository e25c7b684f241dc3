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
from massieu.nn.strategy import Heads, HeadsResult, Request


class _ByFeature(NamedTuple):
    """What each query takes of each feature, and the values there."""

    share: Float[Tensor, "B H L m"]
    value: Float[Tensor, "B H m E"]


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
            seed: Of the features that it starts with. Modules with one seed start with the same.
        """
        super().__init__(scale=scale)
        self.kind = choice("kind", kind, "positive", "relu")
        self.features, self.seed = whole_number("features", features, least=2), whole_number("seed", seed, least=0)

    def _create_tensors(self, device: torch.device, dtype: torch.dtype | None) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.num_heads, self.features, self.head_dim, generator=generator, device="cpu")
        hold(self, "directions", drawn, False, device, dtype)

    def redraw(self) -> None:
        """Draw other features, as Performers do from time to time in training."""
        nn.init.normal_(self.directions)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        dtype = torch.promote_types(query.dtype, torch.float32)
        given = request.log_weight
        per_key = not request.is_causal and (given is None or given.shape[1] == given.shape[2] == 1)
        if request.extra == "variance" and not per_key:
            raise ValueError(
                "need_variance goes with masks of keys, the same for every query; got causality or attn_mask"
            )
        with without_autocast(query.device):
            root = self.head_dim**-0.25 if self.scale is None else per_head(self.scale**0.5)
            parts = query.to(dtype) * root, key.to(dtype) * root, value.to(dtype)
            if request.need_weights or request.dropout or not per_key:
                log_weight = with_positions(given, query, key, request.is_causal)
                output, weights, level = self._by_weights(*parts, log_weight, request)
            else:
                weights = None
                output, level = (self._by_attention if self.kind == "positive" else self._by_products)(*parts, given)
            beside = level if request.extra == "log_partition" else None
            if request.extra == "variance":
                beside = self._variance(self._by_feature(*parts, given), output.to(dtype))
        output = output.to(query.dtype)
        return HeadsResult(output, None if weights is None else weights.to(query.dtype), beside)

    def _omega(self, like: Float[Tensor, "B H _ D"]) -> Float[Tensor, "B H m D"]:
        return self.directions.to(like.dtype).expand(like.shape[0], -1, -1, -1)

    def _sums(
        self, key: Tensor, value: Tensor, log_weight: Mask | None
    ) -> tuple[Float[Tensor, "B H m E"], Float[Tensor, "B H 1 m"]]:
        """Of positive features: features attend to keys. Their mean values, and log Σ_n w_n φ_ω(k_n)."""
        weight = added(log_weight, -key.square().sum(-1).unsqueeze(-2) / 2)
        found = ops.attention(self._omega(key), key, value, log_weight=weight, scale=1.0)
        return found.output, found.log_partition.unsqueeze(-2)

    def _by_attention(
        self, query: Tensor, key: Tensor, value: Tensor, log_weight: Mask | None
    ) -> tuple[Tensor, Float[Tensor, "B H L"]]:
        """Of positive features: then queries attend to features."""
        values, sums = self._sums(key, value, log_weight)
        found = ops.attention(query, self._omega(query), values, log_weight=sums, scale=1.0)
        return found.output, self._mean_level(found.log_partition, query)

    def _mean_level(self, level: Float[Tensor, "B H L"], query: Tensor) -> Float[Tensor, "B H L"]:
        return level - query.square().sum(-1) / 2 - math.log(self.features)

    def _positive_parts(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        omega = self._omega(query).mT
        return torch.relu(query @ omega), torch.relu(key @ omega)

    def _by_products(
        self, query: Tensor, key: Tensor, value: Tensor, log_weight: Mask | None
    ) -> tuple[Tensor, Float[Tensor, "B H L"]]:
        """Of the positive parts: sums over keys, then products with the queries'."""
        of_query, of_key = self._positive_parts(query, key)
        of_key = of_key * added(log_weight, key.new_zeros(key.shape[:-1]).unsqueeze(-2)).exp().mT
        total = (of_query @ of_key.sum(-2).unsqueeze(-1)).squeeze(-1)
        output = of_query @ (of_key.mT @ value) / torch.where(total > 0, total, 1.0).unsqueeze(-1)
        return output, (total / self.features).log()

    def _by_weights(
        self, query: Tensor, key: Tensor, value: Tensor, log_weight: Mask | None, request: Request
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By the matrix of the kernel, in float64 and logarithms: what a causal query sees may be a small part of all."""
        query, key = query.double(), key.double()
        if self.kind == "relu":
            of_query, of_key = self._positive_parts(query, key)
            kernel = of_query @ of_key.mT / self.features
            kernel = kernel * added(log_weight, torch.zeros_like(kernel)).exp()
            total = kernel.sum(-1, keepdim=True)
            weights, level = kernel / torch.where(total > 0, total, 1.0), total.log()
        else:
            scores = added(log_weight, self._positive_level(query, key))
            level = logsumexp(scores).unsqueeze(-1)
            weights = (scores - level.masked_fill(level == -torch.inf, 0.0)).exp()
        return request.dropped(weights) @ value.double(), weights, level.squeeze(-1).to(value.dtype)

    def _positive_level(self, query: Tensor, key: Tensor) -> Float[Tensor, "B H L N"]:
        """The logarithm of the positive features' kernel."""
        omega = self._omega(query).mT
        parts = query @ omega, key @ omega
        tops = [part.amax(-1, keepdim=True).detach() for part in parts]
        of_query, of_key = ((part - top).exp() for part, top in zip(parts, tops, strict=True))
        product = (of_query @ of_key.mT).clamp_min(torch.finfo(torch.float64).tiny) / self.features
        shifts = (top - x.square().sum(-1, keepdim=True) / 2 for top, x in zip(tops, (query, key), strict=True))
        query_shift, key_shift = shifts
        return product.log() + query_shift + key_shift.mT

    def _by_feature(self, query: Tensor, key: Tensor, value: Tensor, log_weight: Mask | None) -> _ByFeature:
        if self.kind == "positive":
            values, sums = self._sums(key, value, log_weight)
            scores = query @ self._omega(query).mT + sums
            seen = scores > -torch.inf
            return _ByFeature(torch.where(seen, torch.softmax(scores, -1), 0.0), values)
        of_query, of_key = self._positive_parts(query, key)
        of_key = of_key * added(log_weight, key.new_zeros(key.shape[:-1]).unsqueeze(-2)).exp().mT
        sums = of_key.sum(-2).unsqueeze(-2)
        share = of_query * sums
        total = share.sum(-1, keepdim=True)
        values = of_key.mT @ value / torch.where(sums > 0, sums, 1.0).mT
        return _ByFeature(share / torch.where(total > 0, total, 1.0), values)

    def _variance(self, found: _ByFeature, output: Tensor) -> Float[Tensor, "B H L"]:
        squares = found.share.square()
        apart = (
            squares @ found.value.square().sum(-1, keepdim=True)
            - 2 * ((squares @ found.value) * output).sum(-1, keepdim=True)
            + squares.sum(-1, keepdim=True) * output.square().sum(-1, keepdim=True)
        ).squeeze(-1)
        return apart.clamp_min(0.0) * self.features / (self.features - 1)
