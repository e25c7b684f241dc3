"""What a head does with a text that repeats itself: tokens drawn at random, and the same tokens once more.

Nothing predicts such tokens but their order, so a head that finds the token behind the earlier occurrence has looked it up.
Each function of a reading gives the weight of every query on the key at some distance before it. The names are those of
Elhage et al. and of Olsson et al.; the definitions are stated in full here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from massieu.foundation.matrices import eigenvalues
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Tokens, rows_of_batch
from massieu.probing.model.forward import run
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.positions import max_positions
from massieu.probing.model.tokenizers import embedded, special_ids
from massieu.probing.statistics.group import (
    Event,
    Group,
    ModelReading,
    RatioParts,
    Row,
    RowPlace,
    RunningRatio,
    SiteWeights,
    rows_of,
)
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import REPEATED, Register, moments_of
from massieu.probing.stream.readout import tokens_through
from massieu.probing.stream.replays import why_no_maps
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.units import Estimate, Units

CIRCUITS = "Elhage et al., A Mathematical Framework for Transformer Circuits (2021)"
INDUCTION = "Olsson et al., In-context Learning and Induction Heads (arXiv 2209.11895)"

REGISTER = Register[Callable[[QueryReading, int], Tensor]](REPEATED)
COPYING = Register[Callable[[Tensor, Tensor, Tensor], Tensor]](REPEATED)
_on_repeated = partial(
    REGISTER.statistic,
    claim="",
    caveat="Measured on random tokens. A head may attend to a token without copying it: see the copying score.",
)


@_on_repeated("Induction weight", formula="mean p of the key behind the token's earlier occurrence", paper=INDUCTION)
def induction_weight(reading: QueryReading, length: int) -> Float[Tensor, "B H L"]:
    """When a token is repeated, how much does the head attend to the token that followed it the first time?"""
    return reading.weight_before(length - 1)


@_on_repeated(
    "Weight on the same token's earlier place", formula="mean p of the token's earlier occurrence", paper=CIRCUITS
)
def duplicate_token_weight(reading: QueryReading, length: int) -> Float[Tensor, "B H L"]:
    """When a token is repeated, how much does the head attend to its first occurrence?"""
    return reading.weight_before(length)


@_on_repeated("Weight on the previous token, random text", formula="mean p of the key one place before", paper=CIRCUITS)
def previous_token_weight(reading: QueryReading, length: int) -> Float[Tensor, "B H L"]:
    """How much does the head attend to the previous token in random text, where content does not help?"""
    return reading.weight_before(1)


WEIGHTS = (induction_weight, duplicate_token_weight, previous_token_weight)
NAMES = tuple(weight.__name__ for weight in WEIGHTS)


@dataclass(frozen=True, eq=False)
class RepeatedWeights:
    """`WEIGHTS` at one site: a row for each, an error unit for each sequence.

    It is not a running result: every process that reads a part of the text measures all of it.
    """

    ratio: Ratio


@COPYING.statistic(
    "Copying score",
    formula="Σλ / Σ|λ|, λ the eigenvalues of W_U W_O W_V W_E, norm gains folded in",
    claim="",
    paper=CIRCUITS,
    caveat="It describes the direct path from a token's embedding through this head to the logits, without other layers.",
    control=None,
    signed=True,
)
def copying_score(
    value: Float[Tensor, "H Dv D"], output: Float[Tensor, "H D Dv"], tokens: Float[Tensor, "D D"]
) -> Float64[Tensor, " H"]:
    """Does the head raise (1) or lower (−1) the logits of the tokens that it attends to?"""
    # A B and B A have the same eigenvalues but for zeros, so Dv × Dv matrices do for the vocabulary's square. `tokens` is
    # W_Eᵀ W_U, summed over the vocabulary.
    spectrum = eigenvalues((value.to(tokens) @ tokens @ output.to(tokens)).double())
    return spectrum.real.sum(-1) / spectrum.abs().sum(-1)


SEQUENCES = 16
LENGTH = 50
"""Tokens that are repeated, if the model takes that many."""
_SEQUENCES_PER_PASS = 4
_FEWEST_TOKENS = 4
_UNITS = Units("document")  # sequences are drawn independently of each other
_NOT_THE_SAME_TOKENS = "the queries and the keys at this site are not the same made-up tokens, one for one"


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """Sequences of different tokens drawn at random, each followed by the same sequence again.

    Attributes:
        ids: with the tokens with which the model's rows begin and end.
        length: number of tokens that are repeated.
    """

    ids: Int[Tensor, "sequences L"]
    length: int

    @classmethod
    def drawn(
        cls, vocabulary: Sequence[int], before: Sequence[int], after: Sequence[int], longest: int | None, seed: int
    ) -> "RepeatedTokens | str":
        """Draw sequences from a vocabulary, uniformly; or one sentence that says why there are none.

        Args:
            before, after: tokens with which the model's rows begin and end.
            longest: the largest number of tokens that the model reads; None if it is not limited.
        """
        room = LENGTH if longest is None else (longest - len(before) - len(after)) // 2
        length = min(LENGTH, room, len(vocabulary))
        if length < _FEWEST_TOKENS:
            return (
                f"repeated tokens need room for twice {_FEWEST_TOKENS} tokens and as many words, and there are {length}"
            )
        generator = torch.Generator().manual_seed(seed)
        words = torch.tensor(vocabulary)
        sequences = torch.stack(
            [words[torch.randperm(len(words), generator=generator)[:length]] for _ in range(SEQUENCES)]
        )
        # `view`: without tokens before or after, these have shape (SEQUENCES, 0).
        start = torch.tensor([list(before)] * SEQUENCES, dtype=sequences.dtype).view(SEQUENCES, -1)
        end = torch.tensor([list(after)] * SEQUENCES, dtype=sequences.dtype).view(SEQUENCES, -1)
        return cls(torch.cat([start, sequences, sequences, end], dim=1), length)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        tokenizer: Any,
        around: tuple[Sequence[int], Sequence[int]] | None,
        inputs: dict[str, Any],
        seed: int,
    ) -> "RepeatedTokens | str":
        """Sequences from a model's own vocabulary, begun and ended as its rows of text are; or why there are none.

        Args:
            tokenizer: knows which tokens are special; None if there is no tokenizer.
            around: tokens with which rows begin and end; None where the first batch shows them.
            inputs: the first batch.
        """
        ids = inputs.get("input_ids")
        vocabulary_size = embedded(loaded.module)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or vocabulary_size is None:
            return "the model is not given tokens of a vocabulary"
        special = special_ids(tokenizer, getattr(loaded.module, "config", None))
        if around is None:
            first = int(ids[0, 0])
            begins_with_first = first in special and bool((ids[:, 0] == first).all())
            around = ([first] if begins_with_first else [], [])
        vocabulary = [number for number in range(vocabulary_size) if number not in special]
        drawn = cls.drawn(vocabulary, *around, max_positions(loaded.module), seed)
        if isinstance(drawn, str):
            return drawn
        continuous = sorted(
            name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()
        )
        if continuous and not drawn._run_alone(loaded.module, "attention_mask" in inputs):
            return f"the model does not run on tokens alone, without {' and '.join(continuous)}"
        return drawn

    def _run_alone(self, model: Any, masked: bool) -> bool:
        """Whether a model that was given more inputs than tokens also runs on one of these sequences alone."""
        try:
            with torch.no_grad():
                run(model, model_inputs(model, self.inputs(slice(1), masked)))
        except Exception:  # the model may raise any class
            return False
        return True

    def inputs(self, rows: slice, masked: bool) -> dict[str, Tensor]:
        """Some of the sequences; for a model that is given masks, with a mask in which all tokens are real."""
        ids = self.ids[rows]
        if not masked:
            return {"input_ids": ids}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class RepeatedGroup(Group):
    """What heads do with repeated random tokens, and whether they copy what they attend to.

    It is measured once, before the text and independently of it. Every process that shares a text, and a resumed run, finds
    the same numbers; so it is not a running result.
    """

    name = REPEATED
    events = frozenset({Event.WEIGHTS})
    beginning = "reading repeated tokens"

    def begin(self, model: ModelReading) -> None:
        """Draw the sequences and run the model on them."""
        super().begin(model)
        self.weights: dict[int, RepeatedWeights] = {}
        self.copying: dict[int, Float64[Tensor, " H"]] = {}
        self._through: Tensor | None = None
        for info in model.sites:
            reason = why_no_maps(info)
            if reason is not None:
                self.missing(info.site.name, copying_score.__name__, reason)
        source = model.source
        inputs = dict(model.inputs)
        if source is None:
            self.failed[REPEATED] = "there is no text to learn the vocabulary from"
            return
        sequences = RepeatedTokens.of(source.loaded, source.tokenizer, source.around, inputs, model.seed)
        if isinstance(sequences, str):
            self.failed[REPEATED] = sequences
            return
        self._read_all(sequences, "attention_mask" in inputs)
        if model.model is source.loaded.module and self.measures(copying_score.__name__):
            with self.fence(copying_score.__name__):
                first_row = rows_of_batch(inputs, [0], len(inputs["input_ids"]))
                through = tokens_through(source.loaded, first_row)
                if isinstance(through, str):
                    self.failed[copying_score.__name__] = through
                else:
                    self._through = through

    def _read_all(self, sequences: RepeatedTokens, masked: bool) -> None:
        """Run the model on all sequences.

        Args:
            masked: whether the model is given a mask with its tokens.

        Raises:
            Exception: of any class, from the model.
        """
        by_site = {info.site: info for info in self.model.sites}
        for first in range(0, SEQUENCES, _SEQUENCES_PER_PASS):
            inputs = sequences.inputs(slice(first, first + _SEQUENCES_PER_PASS), masked)
            prepared = model_inputs(self.model.model, inputs)
            numbers = range(first, first + len(inputs["input_ids"]))

            # The defaults bind this pass's values: a closure over the loop's variables would see the last ones.
            def observe(call: AttentionCall, batch: Any = prepared, numbers: Sequence[int] = numbers) -> None:
                if call.site in by_site and not call.repeated:
                    with torch._C.DisableTorchFunction():
                        self._read_call(call, by_site[call.site], sequences.length, BatchTokens(batch), numbers)

            with torch.no_grad(), capturing(self.model.model, observe):
                run(self.model.model, prepared)

    def _read_call(
        self, call: AttentionCall, info: SiteInfo, period: int, tokens: BatchTokens, numbers: Sequence[int]
    ) -> None:
        """Add the weights of one attention call, at the queries whose token stood ``period`` places before."""
        ids = tokens.ids(decoder=info.in_decoder)
        batch, _, length, _ = call.query.shape
        if info.kind == "cross" or ids is None or ids.shape != (batch, length) or call.key.shape[2] != length:
            for name in NAMES:
                self.missing(info.site.name, name, _NOT_THE_SAME_TOKENS)
            return
        is_repeated = torch.zeros_like(ids, dtype=torch.bool)
        is_repeated[:, period:] = ids[:, period:] == ids[:, :-period]
        unpadded = Tokens(torch.ones_like(is_repeated), None)
        positions = torch.arange(length, device=ids.device)
        reading = QueryReading(call, unpadded, unpadded, positions, True, moments_of(()))
        weights = torch.stack([weight(reading, period) for weight in WEIGHTS])  # (statistics, B, H, L)
        usable = (is_repeated[:, None] & reading.valid)[None] & weights.isfinite()
        totals = torch.where(usable, weights, 0.0).sum(-1, dtype=torch.float64)
        running = self.weights.setdefault(info.index, RepeatedWeights(Ratio((len(WEIGHTS), info.heads), _UNITS)))
        running.ratio.update(totals.transpose(0, 1), usable.sum(-1).transpose(0, 1), numbers)

    def on_weights(self, weights: SiteWeights) -> None:
        """The copying score of the heads of a site."""
        name = copying_score.__name__
        if self._through is None or self.is_missing(weights.info.site.name, name) or not self.measures(name):
            return
        with self.fence(name):
            maps = weights.writes()
            if isinstance(maps, str):
                self.missing(weights.info.site.name, name, maps)
            else:
                self.copying[weights.info.index] = copying_score(*maps, self._through)

    def ratios(self) -> Iterator[RunningRatio]:
        """The weights on earlier places."""
        for info in self.model.sites:
            for index, name in enumerate(NAMES) if info.index in self.weights else ():
                yield RunningRatio(RowPlace.of_site(info), name, self.weights[info.index].ratio, index)

    def rows(self) -> Iterator[Row]:
        """The weights on earlier places with their halves, and the copying score."""
        for place, name, ratio, index in self.ratios():
            yield from rows_of(place, name, RatioParts(ratio), index)
        for info in self.model.sites:
            if info.index in self.copying:
                copying = self.copying[info.index].numpy()
                exact = Estimate(copying, np.zeros(info.heads), np.ones(info.heads))
                yield Row(RowPlace.of_site(info), copying_score.__name__, "", exact)
