"""Which tokens are real of a sequence that a model makes of the text inside, and whose length is another (Funnel's pooling).

The batch's mask does not fit such a sequence, and the layer that makes it shows the padding of what it attends to, not of its
queries. Passes before the one that is read show the rest: a later layer whose keys these tokens are, or else which queries
change with what stands at padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Side
from massieu.probing.model.forward import run
from massieu.probing.model.precision import tolerance


class PooledLengths:
    """Looks ahead in the batches of one model, if it has sequences of lengths that masks do not tell."""

    def __init__(self, model: nn.Module, sites: Sequence[SiteInfo]) -> None:
        self._model, self._sites = model, {info.site: info for info in sites}
        # Queries of another length than their keys belong to no decoder here: these have masks of their own.
        self._needed = any(info.kind == "cross" and not info.in_decoder for info in sites)

    def look_ahead(self, tokens: BatchTokens) -> None:
        """Tell the tokens of a batch what their own pass would show too late, or not at all."""
        mask = tokens.mask(decoder=False)
        if not self._needed or mask is None or bool(mask.all()):
            return
        ahead = replace(tokens, by_length={}, unknown=set())
        seen = self._pass(ahead, ahead.inputs)
        if not ahead.unknown:
            self._needed = False
            return
        tokens.by_length.update(ahead.by_length)
        changed = _with_other_padding(ahead.inputs, mask)
        missing = ahead.unknown - ahead.by_length.keys()
        if missing and changed is not None:
            tokens.by_length.update(_unchanged(seen, self._pass(replace(ahead), changed), missing))

    def _pass(self, tokens: BatchTokens, inputs: dict[str, Any]) -> list["_SeenQueries"]:
        seen: list[_SeenQueries] = []

        def look(call: AttentionCall) -> None:
            info = self._sites.get(call.site)
            if info is None or call.repeated:
                return
            real = tokens.of(call, decoder=info.in_decoder, cross=info.kind == "cross").real
            side = Side(info.in_decoder, call.query.shape[2])
            told = None if side in tokens.unknown else real
            seen.append(_SeenQueries(side, call.query.double().mean((1, 3)), told, call.query.dtype))

        with torch.no_grad(), capturing(self._model, look):
            run(self._model, inputs)
        return seen


@dataclass(frozen=True, eq=False)
class _SeenQueries:
    """Each token's mean query number of one call, and which tokens are real where that was told."""

    side: Side
    numbers: Float[Tensor, "B L"]
    real: Bool[Tensor, "B L"] | None
    dtype: torch.dtype

    def changed(self, other: "_SeenQueries") -> Bool[Tensor, "B L"]:
        size = self.numbers.abs().amax()
        return (self.numbers - other.numbers).abs() > tolerance(self.dtype) * size


def _with_other_padding(inputs: dict[str, Any], mask: Bool[Tensor, "B L"]) -> dict[str, Any] | None:
    """The same batch with another token in place of padding; None where it is not given as tokens."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.shape != mask.shape or not bool(mask.any()):
        return None
    padding, real = ids[~mask], ids[mask]
    others = real[~torch.isin(real, padding)]
    return None if not len(others) else {**inputs, "input_ids": torch.where(mask, ids, others[0])}


def _unchanged(
    seen: list[_SeenQueries], again: list[_SeenQueries], missing: set[Side]
) -> dict[Side, Bool[Tensor, "B L"]]:
    """Queries of these lengths that do not depend on padding; of none where real tokens of a call before them do too."""
    found: dict[Side, Tensor] = {}
    for before, after in zip(seen, again, strict=True):
        changed = before.changed(after)
        if before.real is not None and bool((changed & before.real).any()):
            return found
        if before.side in missing:
            found.setdefault(before.side, ~changed)
    return found
