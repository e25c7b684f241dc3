"""The real tokens of a sequence that a model makes inside, with another length than the text's (Funnel's pooling).

The batch's mask does not fit such a sequence, and the layer that makes it shows the padding of its keys, not of its queries.
The padding of the queries is found in passes before the one that is read. A later layer has these tokens as its keys, and
shows their padding. Where none does, queries that depend on the token at padding are padding themselves.
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
    """Finds the real tokens of a model's inner sequences by passes ahead, where no mask has their length."""

    def __init__(self, model: nn.Module, sites: Sequence[SiteInfo]) -> None:
        self._model = model
        self._sites = {info.site: info for info in sites}
        self._needed = True

    def look_ahead(self, tokens: BatchTokens) -> None:
        """Give the tokens of a batch the real ones of each inner sequence, before the pass that is read."""
        mask = tokens.mask(decoder=False)
        if not self._needed or mask is None or bool(mask.all()):
            return
        # Once every sequence of a padded batch has a mask that fits, later batches need no pass ahead.
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
            known_real = None if side in tokens.unknown else real
            # The mean over heads and features, (B, L): one number a token is enough to see whether it changes.
            token_means = call.query.double().mean((1, 3))
            seen.append(_SeenQueries(side, token_means, known_real, call.query.dtype))

        with torch.no_grad(), capturing(self._model, look):
            run(self._model, inputs)
        return seen


@dataclass(frozen=True, eq=False)
class _SeenQueries:
    """The queries of one call, each by the mean of its numbers.

    Attributes:
        real: which tokens are real; None where no mask has their length.
        dtype: of the queries, by which a change is told from rounding.
    """

    side: Side
    means: Float[Tensor, "B L"]
    real: Bool[Tensor, "B L"] | None
    dtype: torch.dtype

    def changed(self, other: "_SeenQueries") -> Bool[Tensor, "B L"]:
        """Which queries differ from another pass's by more than rounding."""
        size = self.means.abs().amax()
        return (self.means - other.means).abs() > tolerance(self.dtype) * size


def _with_other_padding(inputs: dict[str, Any], mask: Bool[Tensor, "B L"]) -> dict[str, Any] | None:
    """The same batch with a real token in place of padding; None where the batch has no token to put there."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.shape != mask.shape or not bool(mask.any()):
        return None
    padding_ids = ids[~mask]
    real_ids = ids[mask]
    other_ids = real_ids[~torch.isin(real_ids, padding_ids)]
    if not len(other_ids):
        return None
    return {**inputs, "input_ids": torch.where(mask, ids, other_ids[0])}


def _unchanged(
    seen: list[_SeenQueries], again: list[_SeenQueries], missing: set[Side]
) -> dict[Side, Bool[Tensor, "B L"]]:
    """The queries of the missing sequences that do not depend on padding, by the first call that has them.

    Calls behind one whose real tokens depend on padding say nothing: there the model mixes padding into the text.
    """
    real: dict[Side, Tensor] = {}
    for before, after in zip(seen, again, strict=True):
        changed = before.changed(after)
        if before.real is not None and bool((changed & before.real).any()):
            return real
        if before.side in missing:
            real.setdefault(before.side, ~changed)
    return real
