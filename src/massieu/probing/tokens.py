"""Which tokens a batch has: real or padding, special or not, in the text and in what a decoder reads.

Attention is told which tokens there are by the batch's masks. Where a model attends to something else than what the masks
are about (frames of audio, patches), padding is what no query sees.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from massieu.probing.attention_call import AttentionCall
from massieu.probing.forward import decoder_given, real_mask
from massieu.probing.statistics.expansion import distinct_positions
from massieu.probing.statistics.query_reading import Tokens

SAMPLE_SHARE = 0.1  # of the windows, for replays, clouds and controls
SAMPLE_LEAST = 4  # windows at the beginning that are always sampled, so that short texts have error bars


def is_sampled(window: int) -> bool:
    """Whether a window of the text is one of those on which replays and clouds are measured."""
    return window < SAMPLE_LEAST or int((window + 1) * SAMPLE_SHARE) > int(window * SAMPLE_SHARE)


def sampled_before(window: int) -> int:
    """How many windows before this one are sampled: where this one stands among them, if it is."""
    return window if window < SAMPLE_LEAST else SAMPLE_LEAST + int(window * SAMPLE_SHARE)


def drawn_for(seed: int, window: int, purpose: int) -> torch.Generator:
    """Random numbers that belong to one window and one purpose."""
    return torch.Generator().manual_seed(hash((seed, window, purpose)) % 2**63)


def real_tokens(
    call: AttentionCall, inputs: dict[str, Any], *, decoder: bool, keys: bool = False
) -> Bool[Tensor, "B L"]:
    """Which of a call's queries, or of its keys, are no padding.

    Args:
        decoder: they are tokens of the decoder.
    """
    batch, length = call.query.shape[0], call.key.shape[2] if keys else call.query.shape[2]
    mask = real_mask(inputs, decoder=decoder)
    if mask is not None and tuple(mask.shape) == (batch, length):
        return mask.to(call.query.device)
    if mask is not None and call.key.shape[2] == length:
        return call.visible().any(dim=2).any(dim=1).expand(batch, -1)
    return torch.ones(batch, length, dtype=torch.bool, device=call.query.device)


@dataclass(frozen=True, eq=False)
class BatchTokens:
    """The tokens of one batch, as the model was given them.

    Attributes:
        inputs: what the model's forward is called with.
        special: special tokens of ``input_ids``; None where that is not known.
        target_special: those of ``decoder_input_ids``.
        frames: which frames of audio are real, where the text side is audio.
        follows: the decoder reads the same text behind a start token.
    """

    inputs: dict[str, Any]
    special: Bool[Tensor, "B L"] | None = None
    follows: bool = False
    target_special: Bool[Tensor, "B T"] | None = None
    frames: Bool[Tensor, "B F"] | None = None

    def of(self, call: AttentionCall, *, decoder: bool, keys: bool = False) -> Tokens:
        """Tokens asked about, or attended to, in one attention call."""
        real = real_tokens(call, self.inputs, decoder=decoder, keys=keys)
        if self.frames is not None and not decoder and self.frames.shape == real.shape:
            real = real & self.frames  # of a row too short for a frame, wav2vec 2.0 attends to padding
        special = self._special(decoder)
        fits = special is not None and special.shape == real.shape
        ids = self.ids(decoder=decoder)
        known = ids is not None and ids.shape == real.shape
        restarts = None if decoder and decoder_given(self.inputs) else self._restarts(call, real)
        return Tokens(
            real, special.to(real.device) if special is not None and fits else None, ids if known else None, restarts
        )

    def _restarts(self, call: AttentionCall, real: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"] | None:
        """Where ``position_ids`` go back and attention does not: what packed rows of several documents do."""
        places = self.inputs.get("position_ids")
        if not isinstance(places, Tensor) or places.dim() != 2 or places.shape[1] != real.shape[1]:
            return None
        back = places.to(real.device).diff(dim=1) <= 0
        if not bool(back.any()) or call.query.shape[2] != call.key.shape[2]:
            return None
        reaches_back = call.visible().diagonal(-1, dim1=2, dim2=3).any(dim=1)
        restarts = torch.zeros_like(real)
        restarts[:, 1:] = back & ~reaches_back
        return restarts & real

    def _special(self, decoder: bool) -> Tensor | None:
        if decoder and self.target_special is not None:
            return self.target_special
        if self.special is None or not decoder:
            return self.special
        if not self.follows:
            return None
        moved = self.special.roll(1, dims=1)
        moved[:, 0] = True  # the start token
        return moved

    def ids(self, *, decoder: bool) -> Tensor | None:
        """The tokens' numbers, where the model was given them."""
        ids = self.inputs.get("decoder_input_ids" if decoder else "input_ids")
        return ids if isinstance(ids, Tensor) else None

    def mask(self, *, decoder: bool) -> Bool[Tensor, "B L"] | None:
        """Which of the same tokens are no padding, where a mask says so."""
        return real_mask(self.inputs, decoder=decoder)

    def counted(self) -> int | None:
        """Real tokens of the text, of both sides where the decoder is given its own; None where the batch is no text."""
        source = self._counted(decoder=False)
        return source if source is None else source + (self._counted(decoder=True) or 0)

    def _counted(self, *, decoder: bool) -> int | None:
        ids, mask = self.ids(decoder=decoder), self.mask(decoder=decoder)
        embedded = self.inputs.get("decoder_inputs_embeds" if decoder else "inputs_embeds")
        if ids is not None:
            shape = ids.shape
        elif isinstance(embedded, Tensor):
            shape = embedded.shape[:2]
        else:
            return None
        return int(mask.sum()) if mask is not None and mask.shape == shape else shape.numel()

    def positions(
        self, row: int, length: int, most: int, decoder: bool, distinct: bool, generator: torch.Generator
    ) -> Int[Tensor, " S"]:
        """Some real positions of one item, in a stream of so many tokens; with ``distinct`` no two of the same token.

        None are given where the item has padding and it is not known which positions of the stream that is.
        """
        ids, mask = self.ids(decoder=decoder), self.mask(decoder=decoder)
        if ids is not None and ids.shape[1] != length:
            ids = None
        device = next(v.device for v in self.inputs.values() if isinstance(v, Tensor))
        if mask is not None and mask.shape[1] == length:
            real = mask[row]
        elif self.frames is not None and not decoder and self.frames.shape[1] == length:
            real = self.frames[row]
        elif mask is not None and ids is None and not bool(mask[row].all()):
            return torch.empty(0, dtype=torch.long, device=device)
        else:
            real = torch.ones(length, dtype=torch.bool, device=device)
        return distinct_positions(ids[row] if ids is not None and distinct else None, real, most, generator)
