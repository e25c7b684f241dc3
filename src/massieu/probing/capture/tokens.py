"""Which tokens a batch has: real or padding, special or not, in the text and in what a decoder reads.

Attention is told which tokens there are by the batch's masks. Where a model attends to something else than what the masks
are about (frames of audio, patches), padding is what no query sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.model.forward import decoder_given, real_mask
from massieu.probing.sums.units import SAMPLE_LEAST, SAMPLE_SHARE


def is_sampled(window: int) -> bool:
    """Whether a window of the text is one of those on which replays and clouds are measured."""
    return window < SAMPLE_LEAST or int((window + 1) * SAMPLE_SHARE) > int(window * SAMPLE_SHARE)


def sampled_before(window: int) -> int:
    """How many windows before this one are sampled: where this one stands among them, if it is."""
    return window if window < SAMPLE_LEAST else SAMPLE_LEAST + int(window * SAMPLE_SHARE)


def drawn_for(seed: int, window: int, purpose: int) -> torch.Generator:
    """Random numbers that belong to one window and one purpose."""
    return torch.Generator().manual_seed(hash((seed, window, purpose)) % 2**63)


def distinct_positions(
    tokens: Int[Tensor, " L"] | None, real: Tensor, most: int, generator: torch.Generator
) -> Int[Tensor, " S"]:
    """Up to ``most`` random real positions of one sequence, no two with the same token.

    Two equal tokens start as the same point in models without position vectors, and a covariance would be singular.
    """
    places = real.nonzero()[:, 0]
    places = places[torch.randperm(len(places), generator=generator).to(places.device)]
    if tokens is not None:
        # Read in one go: each look at a single number of a GPU waits for it.
        ids = tokens.tolist()
        place_of_id: dict[int, int] = {}
        for place in places.tolist():
            place_of_id.setdefault(ids[place], place)
        places = torch.tensor(list(place_of_id.values()), dtype=torch.long, device=real.device)
    return places[:most].sort().values


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is known of the tokens of one batch.

    Attributes:
        real: False at padding.
        special: the tokenizer's special tokens; None where they are not known.
        ids: their numbers; None where the model was given none.
        restarts: where a document begins behind another one, in rows that hold several and attend within each; None where
            there is no such row.
        told: the batch or the call itself says what is padding; else it is as in an earlier call, or there is none.
    """

    real: Bool[Tensor, "B L"]
    special: Bool[Tensor, "B L"] | None
    ids: Int[Tensor, "B L"] | None = None
    restarts: Bool[Tensor, "B L"] | None = None
    told: bool = True

    def first(self) -> Int[Tensor, " B"]:
        """Position of the first real token of each sequence."""
        return self.real.int().argmax(dim=1)

    def begins(self) -> Bool[Tensor, "B L"]:
        """The first real token of each document."""
        first = torch.zeros_like(self.real).scatter_(1, self.first()[:, None], True)
        return first if self.restarts is None else first | self.restarts

    def first_of_document(self, positions: Int[Tensor, " L"]) -> Int[Tensor, "B L_or_1"]:
        """Position of the first real token of the document that holds each of these positions."""
        first = self.first()[:, None]
        if self.restarts is None:
            return first
        begins = torch.arange(self.real.shape[1], device=self.real.device) * self.restarts
        return torch.maximum(first, begins.cummax(dim=1).values[:, positions])


class Side(NamedTuple):
    """A sequence of a model by its length, on the decoder's side or the other."""

    decoder: bool
    length: int


def real_tokens(
    call: AttentionCall, inputs: dict[str, Any], *, decoder: bool, keys: bool = False, cross: bool = False
) -> Bool[Tensor, "B L"] | None:
    """Which of a call's queries, or of its keys, are no padding; None where there is padding and nothing tells where.

    The batch's mask tells it where it fits. Where it does not fit, or has more than two dimensions, it is what the model
    itself masks: padding is a key that no query sees.

    Args:
        decoder: they are tokens of the decoder.
        cross: the queries attend to another sequence, whose keys tell nothing of them.
    """
    batch = call.query.shape[0]
    length = call.key.shape[2] if keys else call.query.shape[2]
    mask = real_mask(inputs, decoder=decoder)
    if mask is not None and tuple(mask.shape) == (batch, length):
        # Without a decoder's own tokens, a mask is of the queries, and may be as long as the sequence that they attend to.
        is_of_queries = keys and cross and not decoder_given(inputs)
        if not is_of_queries:
            return mask.to(call.query.device)
    if mask is None and not _is_masked(inputs, decoder=decoder):
        return torch.ones(batch, length, dtype=torch.bool, device=call.query.device)
    if keys or (call.key.shape[2] == length and not cross):
        some_query_sees_it = call.visible().any(dim=2).any(dim=1)
        return some_query_sees_it.expand(batch, -1)
    return None


def _is_masked(inputs: dict[str, Any], *, decoder: bool) -> bool:
    """Whether a model is given another mask than `real_mask` reads, such as one of pixels or of pairs of tokens."""
    names = [name for name, value in inputs.items() if isinstance(value, Tensor) and name.endswith(("mask", "lengths"))]
    return any(name.startswith(("decoder", "tgt")) == decoder for name in names)


@dataclass(frozen=True, eq=False)
class BatchTokens:
    """The tokens of one batch, as the model was given them.

    Attributes:
        inputs: what the model's forward is called with.
        special: special tokens of ``input_ids``; None where that is not known.
        target_special: those of ``decoder_input_ids``.
        frames: which frames of audio are real, where the text side is audio.
        by_length: which tokens are real of sequences that the masks do not fit, as far as calls have shown it.
        unknown: such sequences of which nothing was known when their queries were asked for.
        follows: the decoder reads the same text behind a start token.
    """

    inputs: dict[str, Any]
    special: Bool[Tensor, "B L"] | None = None
    follows: bool = False
    target_special: Bool[Tensor, "B T"] | None = None
    frames: Bool[Tensor, "B F"] | None = None
    by_length: dict[Side, Bool[Tensor, "B L"]] = field(default_factory=dict)
    unknown: set[Side] = field(default_factory=set)

    def of(self, call: AttentionCall, *, decoder: bool, keys: bool = False, cross: bool = False) -> Tokens:
        """Tokens asked about, or attended to, in one attention call."""
        real, told = self._real(call, decoder, keys, cross)
        if self.frames is not None and not decoder and self.frames.shape == real.shape:
            real = real & self.frames  # of a row too short for a frame, wav2vec 2.0 attends to padding
        # What there is of another sequence, as the text beside frames of audio, says nothing of these tokens.
        special = self._special(decoder)
        if special is not None:
            special = special.to(real.device) if special.shape == real.shape else None
        ids = self.ids(decoder=decoder)
        if ids is not None and ids.shape != real.shape:
            ids = None
        has_own_tokens = decoder and decoder_given(self.inputs)
        restarts = None if has_own_tokens else self._restarts(call, real)
        return Tokens(real, special, ids, restarts, told)

    def _real(self, call: AttentionCall, decoder: bool, keys: bool, cross: bool) -> tuple[Bool[Tensor, "B L"], bool]:
        """Which tokens are no padding, and whether that is told for this call."""
        real = real_tokens(call, self.inputs, decoder=decoder, keys=keys, cross=cross)
        batch = call.query.shape[0]
        length = call.query.shape[2]
        side = Side(decoder, length)
        if real is not None:
            if not keys and self._num_rows() == batch:
                self.by_length[side] = real
            return real, True
        earlier = self.by_length.get(side)
        if earlier is not None and len(earlier) == batch:
            return earlier, False
        mask = self.mask(decoder=decoder)
        if mask is None or not bool(mask.all()):
            self.unknown.add(side)
        return torch.ones(batch, length, dtype=torch.bool, device=call.query.device), False

    def untold(self) -> list[int]:
        """Lengths of sequences with padding of which it was not known where, so that all tokens counted as real."""
        lengths = set[int]()
        for side in self.unknown:
            real = self.by_length.get(side)
            if real is None or not bool(real.all()):
                lengths.add(side.length)
        return sorted(lengths)

    def _num_rows(self) -> int | None:
        """Rows of the batch, by its first tensor; None where it has none."""
        for value in self.inputs.values():
            if isinstance(value, Tensor) and value.dim():
                return len(value)
        return None

    def _restarts(self, call: AttentionCall, real: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"] | None:
        """Where ``position_ids`` go back and attention does not: what packed rows of several documents do."""
        positions = self.inputs.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != real.shape[1]:
            return None
        goes_back = positions.to(real.device).diff(dim=1) <= 0
        if not bool(goes_back.any()) or call.query.shape[2] != call.key.shape[2]:
            return None
        # Of each token but the first: whether some head lets it see the token before.
        sees_previous = call.visible().diagonal(-1, dim1=2, dim2=3).any(dim=1)
        restarts = torch.zeros_like(real)
        restarts[:, 1:] = goes_back & ~sees_previous
        return restarts & real

    def _special(self, decoder: bool) -> Tensor | None:
        if decoder and self.target_special is not None:
            return self.target_special
        if self.special is None or not decoder:
            return self.special
        if not self.follows:
            return None
        shifted = self.special.roll(1, dims=1)
        shifted[:, 0] = True  # the start token
        return shifted

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
        if source is None:
            return None
        target = self._counted(decoder=True)
        return source if target is None else source + target

    def _counted(self, *, decoder: bool) -> int | None:
        ids = self.ids(decoder=decoder)
        mask = self.mask(decoder=decoder)
        embedded = self.inputs.get("decoder_inputs_embeds" if decoder else "inputs_embeds")
        if ids is not None:
            shape = ids.shape
        elif isinstance(embedded, Tensor):
            shape = embedded.shape[:2]
        else:
            return None
        if mask is not None and mask.shape == shape:
            return int(mask.sum())
        return shape.numel()

    def positions(
        self, row: int, length: int, most: int, decoder: bool, distinct: bool, generator: torch.Generator
    ) -> Int[Tensor, " S"]:
        """Some real positions of one item, in a stream of so many tokens; with ``distinct`` no two of the same token.

        None are given where the item has padding and it is not known which positions of the stream that is.
        """
        real = self._real_in_row(row, length, decoder)
        if real is None:
            return torch.empty(0, dtype=torch.long, device=self._device())
        ids = self.ids(decoder=decoder)
        if ids is None or ids.shape[1] != length or not distinct:
            return distinct_positions(None, real, most, generator)
        return distinct_positions(ids[row], real, most, generator)

    def _real_in_row(self, row: int, length: int, decoder: bool) -> Bool[Tensor, " L"] | None:
        """Which tokens of one item are real, in a stream of so many; None where there is padding and nothing tells where."""
        mask = self.mask(decoder=decoder)
        ids = self.ids(decoder=decoder)
        side = Side(decoder, length)
        if mask is not None and mask.shape[1] == length:
            return mask[row]
        if self.frames is not None and not decoder and self.frames.shape[1] == length:
            return self.frames[row]
        if side in self.by_length:
            return self.by_length[side][row]
        has_ids = ids is not None and ids.shape[1] == length
        if mask is not None and not has_ids and not bool(mask[row].all()):
            return None
        return torch.ones(length, dtype=torch.bool, device=self._device())

    def _device(self) -> torch.device:
        return next(value.device for value in self.inputs.values() if isinstance(value, Tensor))


def rows_of_batch(inputs: dict[str, Any], chosen: Sequence[int], rows: int) -> dict[str, Any]:
    """Some items of a batch."""
    index = list(chosen)
    return {
        name: value[index] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
        for name, value in inputs.items()
    }
