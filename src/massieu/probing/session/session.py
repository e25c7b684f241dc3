"""One probe under way: batches in, running results, and the record of the run at the end."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import massieu.storage.record as record
from massieu.errors import InputError
from massieu.probing.capture.tokens import BatchTokens, is_sampled, rows_of_batch, sampled_before
from massieu.probing.checks.check import SelfCheck, check_evaluating, first_look
from massieu.probing.checks.nonfinite import in_weights, shows_nan
from massieu.probing.checks.padding import PaddingCheck
from massieu.probing.checks.weights import check_weights
from massieu.probing.data.text import Batch, TextBatches, token_strings
from massieu.probing.data.text_digest import TextDigest
from massieu.probing.data.token_names import NOT_TEXT, token_names
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.forward import named_inputs
from massieu.probing.model.model import LoadedModel
from massieu.probing.model.model_inputs import in_main_memory, model_inputs, with_target
from massieu.probing.model.tokenizers import check_ids
from massieu.probing.model.unwrap import prompt_tokens
from massieu.probing.reading.examples import LONGEST, Examples, ExampleWindow, example_length
from massieu.probing.reading.generation import GeneratingReading, check_causal
from massieu.probing.reading.options import Options
from massieu.probing.reading.per_token import (
    LARGE,
    PER_TOKEN,
    TemporaryFolder,
    TokenRows,
    TokenWriter,
    expected_size,
)
from massieu.probing.reading.reading import Reading, RowNumbers
from massieu.probing.replaced.effect import Effects, ReplacedAttention
from massieu.probing.session.course import Course
from massieu.probing.session.draws import ControlWindow, Draws
from massieu.probing.session.progress import ProbeProgress
from massieu.probing.session.session_record import Input, SessionRecord, behind_prefix
from massieu.probing.session.sharing import Sharing
from massieu.probing.statistics.group import Source
from massieu.probing.statistics.registry import ATTENTION
from massieu.probing.sums.running import State
from massieu.storage.record_files import TOKENS

Marks = tuple[Tensor | None, Tensor | None]
"""Special tokens of the text, and of what a decoder reads beside it."""
EXAMPLES = 2


@dataclass(eq=False)
class Session(SessionRecord):
    """One probe under way; what it reads and checks is there once it has begun."""

    loaded: LoadedModel
    given: Input
    options: Options
    tell: Callable[[ProbeProgress], None]
    max_tokens: int | None
    begun: bool = False
    reading: Reading = field(init=False)
    check: SelfCheck = field(init=False)
    padding: PaddingCheck = field(init=False)
    draws: Draws | None = None
    course: Course | None = None  # where sums are stored or processes share the text
    tokens: int = 0  # that were read here
    read: int = 0  # windows
    batches: int = 0  # of the text that this process has come past
    windows: int = 0
    passed: int = 0  # tokens
    replacements: list[record.ReplacementRecord] = field(default_factory=list)
    recorded: int = 0  # batches with a sampled window
    broken_weights: record.Trouble | None = None
    unexplained: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    digest: TextDigest = field(default_factory=TextDigest)
    sharing: Sharing | None = None
    rows_in: Path | None = None  # the folder of the per-token rows
    rows_kept: TemporaryFolder | None = None  # where that is a temporary one
    draws_shared: bool = False  # another probe has read them on the same windows
    draws_here: Draws | None = None  # those that this probe reads itself
    source: Source | None = None
    effects: Effects | None = None
    replaced: ReplacedAttention | None = None
    writer: TokenWriter | None = None
    token_rows: TokenRows | None = None

    def read_all(self, interrupted: threading.Event) -> bool:
        """Read every batch; False when interrupted before the end."""
        try:
            for batch in self.given.batches:
                if interrupted.is_set():
                    break
                self._read(batch)
                if self.course is not None:
                    self.course.store(self)
                self.tell(ProbeProgress("reading", max(self.tokens, self.passed), self.max_tokens, self.windows))
        except Exception as error:
            if self.course is not None:
                self.course.add_resume_hint(error)
            raise
        if not self.begun and interrupted.is_set():
            raise KeyboardInterrupt
        if not self.begun:
            raise InputError("there is no batch to read in data")
        if self.course is not None:
            self.course.check_reached(self)
        if self.token_rows is not None:
            self.token_rows.write()
        complete = not interrupted.is_set()
        if complete and self.draws_here is not None:
            self.draws_here.take(*self._share, whole=True)
        if self.course is not None:
            complete = self.course.finish(self, complete)
        if complete and self.sharing is not None:
            self.sharing.keep_draws(self.loaded.module, self.options, self.draws)
        self.reading.finish()
        return complete

    def _read(self, batch: Any) -> None:
        module = self.loaded.module
        inputs = with_target(module, named_inputs(module, batch.inputs if isinstance(batch, Batch) else batch))
        special = (batch.special, batch.target_special) if isinstance(batch, Batch) else (None, None)
        in_memory = in_main_memory(inputs)
        check_ids(module, in_memory)
        if not self.begun:
            self.begin(inputs)
            self._begin_beside(inputs)
            if self.options.per_token:
                self._begin_rows(self.options.per_token)
        if self.options.new_tokens is None:
            self.warnings += self.padding.warnings(in_memory)
        first = self.batches == 0
        # A process that shares the text reads the first batch for the wiring alone, and then begins anew.
        _, processes = self._share
        empty = self.state() if first and processes > 1 else {}
        rows = self.reading.layout.rows(module, inputs)
        self.digest.add(in_memory, rows if self.reading.layout.separable else None)
        counted = BatchTokens(in_memory).counted()
        # The model's wiring is found in the first batch, so every process reads it, and a resumed run reads it again.
        if first or self.course is None or self.course.owns(self.batches):
            self._measure(batch, inputs, special, rows, counted)
        if first:
            self._check_own_functions()
            if self.course is not None:
                self.course.begin(self, empty)
            if self.course is not None and self.writer is not None and self.writer.silent:
                self._go_on_with_rows(self.writer, self.course)
        if self.draws_here is not None:
            self._keep_for_draws(self.draws_here, inputs, special, rows)
            self.draws_here.take(*self._share, whole=False)
        if self.course is not None:
            self.course.advance(self, inputs)
        sampled = sum(is_sampled(self.windows + row) for row in range(rows))
        self.recorded += sampled > 0
        self.batches += 1
        self.windows += rows
        self.passed += counted or 0

    @property
    def _share(self) -> tuple[int, int]:
        """Number of this process, and how many processes share the text."""
        return (0, 1) if self.course is None else (self.course.rank, self.course.processes)

    def _check_own_functions(self) -> None:
        """Check that the user's own functions work on the first batch, before much is read.

        Raises:
            InputError: one of them failed.
        """
        failed = self.reading.failed
        for name in (*self.options.catalogue.own, *self.options.catalogue.groups):
            if name in failed:
                raise InputError(f"the statistic {name} does not work on the first batch: {failed[name]}")

    def _measure(self, batch: Any, inputs: dict[str, Any], special: Marks, rows: int, counted: int | None) -> None:
        numbers = range(self.windows, self.windows + rows)
        ranks = {row: sampled_before(number) for row, number in enumerate(numbers) if is_sampled(number)}
        examples = self.reading.groups.get(Examples.name)
        if isinstance(examples, Examples) and ranks and self.recorded < EXAMPLES:
            examples.current = self._example(batch, inputs, min(ranks), examples.recorded)
        if self.writer is not None:
            self.writer.batch = self.batches
        if self.effects is not None and ranks:
            self.effects.sample(rows_of_batch(inputs, list(ranks), rows), [numbers[row] for row in ranks])
        marks, target = special
        separable = self.reading.layout.separable
        alone = (lambda row: rows_of_batch(inputs, [row], rows)) if separable else None
        self.reading.forward(inputs, marks, ranks, numbers, RowNumbers(numbers, ranks), target, alone)
        self.read += rows
        # Where there is no text, what the first attention layer asks about, such as patches.
        self.tokens = self.reading.queries_read() if counted is None else self.tokens + counted

    # Running sums ------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """All that was measured, per-token rows written; see `massieu.probing.sums.running`."""
        if self.token_rows is not None:
            self.token_rows.write()
        draws = {} if self.draws is None else self.draws.state()
        return {"tokens": self.tokens, "read": self.read, "reading": self.reading.state(), "draws": draws}

    def restore(self, state: State) -> None:
        """Replace all that was measured by a stored state."""
        self.tokens = state["tokens"]
        self.read = state["read"]
        self.reading.restore(state["reading"])
        if self.draws is not None:
            self.draws.restore(state["draws"])

    def add(self, state: State) -> None:
        """Add what another process has measured on other windows."""
        self.tokens += state["tokens"]
        self.read += state["read"]
        self.reading.add(state["reading"])
        if self.draws is not None:
            self.draws.add(state["draws"])

    # Rows for each token -----------------------------------------------------------------------------------------------

    def _begin_rows(self, names: Sequence[str]) -> None:
        """Make ready to write per-token rows of these statistics, and say how many bytes they may take."""
        course = self.course
        if course is None or course.folder is None:
            self.rows_kept = TemporaryFolder()
            self.rows_in = self.rows_kept.path / TOKENS
        else:
            self.rows_in = course.folder / TOKENS
        heads = sum(info.heads for info in self.reading.sites)
        size_in_words, size = expected_size(heads, len(names), self.max_tokens)
        self.tell(ProbeProgress(size_in_words))
        if size > LARGE:
            self.warnings.append(
                f"{size_in_words}; name fewer statistics in per_token, or read fewer tokens, for a smaller table"
            )
        writer = TokenWriter(self.rows_in, names, self.given.tokenizer, self._share)
        self.writer = writer
        self.token_rows = TokenRows(writer)
        self.reading.add_group(self.token_rows)
        # A batch that is read for the wiring alone leaves no rows.
        writer.silent = course is not None and (course.rank > 0 or course.resumes())
        if not writer.silent:
            writer.begin(0)

    def _go_on_with_rows(self, writer: TokenWriter, course: Course) -> None:
        """After the first batch: keep the rows that belong to the stored sums, and drop those after them.

        Raises:
            InputError: the rows are not those of the stored sums.
        """
        token_rows = self.token_rows
        assert token_rows is not None
        remaining = writer.begin(course.start)
        writer.silent = False
        if remaining != token_rows.count and PER_TOKEN not in token_rows.failed:
            raise InputError(
                f"cannot resume: {self.rows_in} holds {remaining:,} per-token rows, and the stored sums are of "
                f"{token_rows.count:,}; begin without resume"
            )

    def begin(self, inputs: dict[str, Any]) -> None:
        """Check the model and the first batch, and make ready to read.

        Raises:
            InputError: what was checked does not hold.
        """
        module = self.loaded.module
        check_evaluating(module.modules())
        self.broken_weights = in_weights(module)
        self.padding = PaddingCheck(module)
        look = first_look(module, inputs)
        self.check = look.check
        if self.loaded.from_files:  # of a module in memory no weight is missing
            self.warnings += check_weights(self.loaded, look.sites, inputs)
        self.unexplained.update(look.unexplained)
        if look.silent:
            self.warnings.append(
                f"{len(look.silent)} modules look like attention but were not seen attending, so they are not in the "
                f"result: {shortened(look.silent, 5)}"
            )
        self.warnings += [f"the attention of {name} is not read: {reason}" for name, reason in look.refused.items()]
        if self.options.new_tokens is not None:
            check_causal(look.sites, inputs, self.loaded.name)
            self.reading = GeneratingReading(
                self.loaded.whole,
                self.options.new_tokens,
                module,
                look.sites,
                self.options,
                layout=look.layout,
                refused=look.refused,
            )
        else:
            around = self.given.batches.around if isinstance(self.given.batches, TextBatches) else None
            self.source = Source(self.loaded, self.given.tokenizer, around)
            self.reading = Reading(
                module,
                look.sites,
                self.options,
                layout=look.layout,
                refused=look.refused,
                inputs=inputs,
                source=self.source,
                tell=self._say,
            )
        self.begun = True

    def _say(self, stage: str) -> None:
        self.tell(ProbeProgress(stage))

    def _begin_beside(self, inputs: dict[str, Any]) -> None:
        """Before the text: the control, and what is measured beside the reading of the text."""
        if self.options.new_tokens is not None:
            return
        if self.options.replace:
            self._begin_effects(inputs)
        if self.options.examples and ATTENTION in self.options.groups:
            self.reading.add_group(Examples())
        if self.options.draws and self._compares():
            self._begin_draws(inputs)

    def _begin_effects(self, inputs: dict[str, Any]) -> None:
        if not self.reading.layout.separable:
            raise InputError("replace works on single windows, and these batches cannot be split into items")
        self.effects = Effects(self.loaded, self.options.replace, self.reading.sites, seed=self.options.seed)
        self.effects.check(inputs)
        self.replaced = ReplacedAttention(self.effects)
        self.reading.add_group(self.replaced)

    def replace_all(self, interrupted: threading.Event) -> bool:
        """Measure what replacements change, once the text was read; False when interrupted before the end."""
        effects = self.effects
        if effects is None or self.replaced is None:
            return True

        def tell(done: int, total: int) -> None:
            self.tell(
                ProbeProgress(f"replacing attention ({done:,} of {total:,} passes)", self.tokens, None, self.windows)
            )

        started = time.perf_counter()
        self.replaced.records = self.replacements = effects.measured(interrupted.is_set, tell)
        self.warnings += effects.warnings()
        self.reading.seconds["replaced attention"] = time.perf_counter() - started
        return effects.complete

    def _compares(self) -> bool:
        """Whether any wanted statistic is compared with a control."""
        names = self.options.statistics
        statistics = self.options.catalogue.statistics.values()
        wanted = [statistic for statistic in statistics if names is None or statistic.name in names]
        return any(statistic.control is not None and statistic.group in self.options.groups for statistic in wanted)

    def _begin_draws(self, inputs: dict[str, Any]) -> None:
        module = self.loaded.module
        sites = self.reading.sites
        shared = None if self.sharing is None else self.sharing.draws(module, self.options)
        if shared is not None:
            self.draws = shared
            self.draws_shared = True
            return
        self.draws = Draws(module, self.reading, inputs, self.source, lambda copied: shows_nan(copied, sites, inputs))
        self.draws_here = self.draws

    def _keep_for_draws(self, draws: Draws, inputs: dict[str, Any], special: Marks, rows: int) -> None:
        """Keep the sampled windows that draws of the control read, whichever process reads them."""
        for row in range(rows):
            number = self.windows + row
            if not is_sampled(number) or not draws.wants(sampled_before(number)):
                continue
            if self.reading.layout.separable:
                marks, target = (None if each is None else each[[row]] for each in special)
                draws.keep(ControlWindow(rows_of_batch(inputs, [row], rows), (marks, target), 0, [number]))
            else:
                numbers = list(range(self.windows, self.windows + rows))
                draws.keep(ControlWindow(inputs, special, row, numbers))

    def _example(
        self, batch: Any, inputs: dict[str, Any], row: int, recorded: Sequence[ExampleWindow]
    ) -> ExampleWindow | None:
        """The example window of a batch's row, with its tokens' names; None where no further example is worth it."""
        names: dict[str, list[str]] = {}
        tokenizer = self.given.tokenizer
        if tokenizer is not None and isinstance(inputs.get("input_ids"), Tensor):
            batch_tokens = BatchTokens(model_inputs(self.loaded.module, inputs))
            for side in ("text", "decoder"):
                ids = batch_tokens.ids(decoder=side == "decoder")
                mask = batch_tokens.mask(decoder=side == "decoder")
                if ids is not None:
                    real_ids = ids[row] if mask is None else ids[row][mask[row]]
                    names[side] = token_strings(tokenizer, real_ids.tolist())
        # Learned prompts and prefixes stand before the text as tokens that have no name of their own.
        learned = [f"[virtual {number}]" for number in range(1, prompt_tokens(self.loaded.module) + 1)]
        names |= {side: [*learned, *tokens] for side, tokens in names.items() if side == "text"}
        for prefix in {info.prefix for info in self.reading.sites} - {0}:
            virtual = [f"[virtual {number}]" for number in range(1, prefix + 1)]
            names |= {behind_prefix(side, prefix): [*virtual, *tokens] for side, tokens in names.items()}
        others = token_names(self.loaded.module, inputs, row) if NOT_TEXT & inputs.keys() else {}
        if "text" in names and len(others.get("image", [])) == inputs["input_ids"].shape[1]:
            # A site's tokens are recognised by their number, and this number would fit text and image alike.
            names = {}
            others = {}
        names = others | names
        title = f"window {self.windows + row}"
        if isinstance(batch, Batch) and batch.names[row]:
            title += f" · {batch.names[row]}"
        window = max(map(len, names.values())) if names else LONGEST
        heads = sum(site.heads for site in self.reading.sites)
        length = example_length(heads, window, sum(example.recorded for example in recorded))
        if not length:
            return None
        return ExampleWindow(title, names, length, row, self.windows + row)
