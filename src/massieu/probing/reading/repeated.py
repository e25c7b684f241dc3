"""Made-up tokens, said twice: what a model reads for the group "repeated", and what is measured of it.

It is measured once, before the text and apart from it: every process that shares a text finds the same, and so does a run
that is gone on with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.tokens import BatchTokens, Tokens
from massieu.probing.model.forward import run
from massieu.probing.model.model import LoadedModel, longest, model_inputs
from massieu.probing.model.tokenizers import embedded, special_ids
from massieu.probing.reading.site_reading import SiteReading
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.statistics.registry import moments_of
from massieu.probing.statistics.repeated import NAMES, WEIGHTS, RepeatedWeights
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.units import Units

SEQUENCES = 16
LENGTH = 50
"""Tokens that are said twice, where the model takes so many."""
_AT_ONCE = 4
_LEAST = 4
_DRAWN = Units("document")  # sequences are drawn one by one, and know nothing of each other
_NOT_TWICE = "the queries and the keys at this site are not the same made-up tokens, one for one"


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """Sequences of tokens drawn at random, without one twice, that are said a second time.

    Attributes:
        ids: with what the model's rows begin and end with.
        length: tokens that are said twice.
    """

    ids: Int[Tensor, "sequences L"]
    length: int

    @classmethod
    def drawn(
        cls, vocabulary: Sequence[int], before: Sequence[int], after: Sequence[int], longest: int | None, seed: int
    ) -> "RepeatedTokens | str":
        """Draw them from a vocabulary, uniformly; or one sentence that says why there are none.

        Args:
            before, after: what the model's rows begin and end with.
            longest: tokens that it reads at most.
        """
        room = LENGTH if longest is None else (longest - len(before) - len(after)) // 2
        length = min(LENGTH, room, len(vocabulary))
        if length < _LEAST:
            return f"repeated tokens need room for twice {_LEAST} tokens and as many words, and there are {length}"
        generator = torch.Generator().manual_seed(seed)
        words = torch.tensor(vocabulary)
        said = torch.stack([words[torch.randperm(len(words), generator=generator)[:length]] for _ in range(SEQUENCES)])
        around = (torch.tensor([list(part)] * SEQUENCES, dtype=said.dtype) for part in (before, after))
        start, end = (part.view(SEQUENCES, -1) for part in around)
        return cls(torch.cat([start, said, said, end], dim=1), length)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        tokenizer: Any,
        around: tuple[Sequence[int], Sequence[int]] | None,
        inputs: dict[str, Any],
        seed: int,
    ) -> "RepeatedTokens | str":
        """Those of a model's own vocabulary, between what its rows of text begin and end with; or why there are none.

        Args:
            tokenizer: knows which tokens are special; None where there is none.
            around: what rows begin and end with; None where that is to be seen in the first batch.
            inputs: the first batch.
        """
        ids, rows = inputs.get("input_ids"), embedded(loaded.module)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or rows is None:
            return "the model is not given tokens of a vocabulary"
        special = special_ids(tokenizer, getattr(loaded.module, "config", None))
        if around is None:
            first = int(ids[0, 0])
            around = ([first] if first in special and bool((ids[:, 0] == first).all()) else []), []
        vocabulary = [number for number in range(rows) if number not in special]
        drawn = cls.drawn(vocabulary, *around, longest(loaded.module), seed)
        others = sorted(
            name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()
        )
        if (
            others
            and isinstance(drawn, RepeatedTokens)
            and not drawn._run_alone(loaded.module, "attention_mask" in inputs)
        ):
            return f"the model does not run on tokens alone, without {' and '.join(others)}"
        return drawn

    def _run_alone(self, model: Any, masked: bool) -> bool:
        """Whether a model that was given more than tokens also runs on one of these sequences."""
        try:
            with torch.no_grad():
                run(model, model_inputs(model, self._inputs(slice(1), masked)))
        except Exception:  # of whatever class the model raises
            return False
        return True

    def _inputs(self, rows: slice, masked: bool) -> dict[str, Tensor]:
        """Some of the sequences, with a mask in which all tokens are real if the model is given masks."""
        ids = self.ids[rows]
        return {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {})

    def read(self, model: Any, results: Sequence[SiteReading], masked: bool) -> None:
        """Run a model on all sequences, and put what is found at each site into its results.

        Args:
            masked: the model is given a mask with its tokens.

        Raises:
            Exception: of any class, from the model.
        """
        by_site = {each.info.site: each for each in results}
        for first in range(0, SEQUENCES, _AT_ONCE):
            inputs = self._inputs(slice(first, first + _AT_ONCE), masked)
            prepared = model_inputs(model, inputs)
            numbers = range(first, first + len(inputs["input_ids"]))

            def look(call: AttentionCall, read: Any = prepared, numbers: Sequence[int] = numbers) -> None:
                if call.site in by_site and not call.repeated:
                    with torch._C.DisableTorchFunction():
                        self._read_call(call, by_site[call.site], BatchTokens(read), numbers)

            with torch.no_grad(), capturing(model, look):
                run(model, prepared)

    def _read_call(
        self, call: AttentionCall, results: SiteReading, tokens: BatchTokens, numbers: Sequence[int]
    ) -> None:
        info = results.info
        ids = tokens.ids(decoder=info.in_decoder)
        shape = (call.query.shape[0], call.query.shape[2])
        if info.kind == "cross" or ids is None or ids.shape != shape or call.key.shape[2] != shape[1]:
            results.unavailable.update(dict.fromkeys(NAMES, _NOT_TWICE))
            return
        again = torch.zeros_like(ids, dtype=torch.bool)
        again[:, self.length :] = ids[:, self.length :] == ids[:, : -self.length]
        known = Tokens(torch.ones_like(again), None)
        positions = torch.arange(shape[1], device=ids.device)
        reading = QueryReading(call, known, known, positions, True, moments_of(()))
        weights = torch.stack([weight(reading, self.length) for weight in WEIGHTS])
        usable = (again[:, None] & reading.valid)[None] & weights.isfinite()
        totals = torch.where(usable, weights, 0.0).sum(-1, dtype=torch.float64)
        if results.repeated is None:
            results.repeated = RepeatedWeights(Ratio((len(WEIGHTS), info.heads), _DRAWN))
        results.repeated.ratio.update(totals.transpose(0, 1), usable.sum(-1).transpose(0, 1), numbers)
