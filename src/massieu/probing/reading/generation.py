"""Statistics while a model writes: one forward pass for each new token, with a cache, and of each pass the last query.

Every new token comes of one query, which sees the keys of all tokens before it. Those queries are read, and no others: of the
prompt its last token, which the first new one comes of. The model's own ``generate`` does the rest.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.layout import BatchLayout
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.capture.tokens import BatchTokens, Tokens
from massieu.probing.checks.nonfinite import in_call
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.forward import uncompiled
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.positions import max_table_positions
from massieu.probing.model.seeding import OwnGenerator
from massieu.probing.model.watching import hooked
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import Reading, RowNumbers
from massieu.probing.statistics.group import CallQueries, Event
from massieu.probing.statistics.query_means import QueryResult
from massieu.probing.statistics.registry import ATTENTION

_CUT = {"weight_first", "weight_special"}  # of tokens that a cache of the latest ones has dropped


def check_generates(whole: Any, name: str) -> None:
    """Raises:
    InputError: the model does not write text, or writes it in a way that is not read.
    """
    if not callable(getattr(whole, "generate", None)) or not whole.can_generate():
        raise InputError(
            f"{name} ({type(whole).__name__}) does not generate text; give a model with a language head, such as "
            "AutoModelForCausalLM loads"
        )
    if whole.config.is_encoder_decoder:
        raise InputError(
            f"continue_for does not work with an encoder–decoder such as {name}; probe it with decoder_input_ids"
        )


def check_causal(sites: Sequence[SiteInfo], inputs: dict[str, Any], name: str) -> None:
    """Raises:
    InputError: queries see later keys, so that a cache would not hold what the model attends to.
    """
    if not isinstance(inputs.get("input_ids"), Tensor):
        raise InputError(
            f"continue_for needs batches of input_ids as prompts for {name}, and these have {', '.join(inputs)}"
        )
    behind = next((info for info in sites if info.prefix), None)
    if behind is not None:
        raise InputError(
            f"{name} attends to {behind.prefix} keys of a prefix before its text, and generation behind a prefix is not read"
        )
    other = [info.site.name for info in sites if info.kind != "causal"]
    if other and inputs["input_ids"].shape[1] > 1:
        raise InputError(
            f"{name} attends to later tokens too ({shortened(other)}), so it cannot generate text token by token"
        )


def check_room(model: nn.Module, prompt: int, most: int) -> None:
    """Check that a model has positions for a prompt and the tokens that it writes, but for the last, which it never reads.

    Raises:
        InputError: its table of positions has fewer rows.
    """
    positions = max_table_positions(model)
    if positions is not None and prompt + most - 1 > positions:
        room = max(positions - prompt + 1, 0)  # the last new token needs no position
        raise InputError(
            f"{type(model).__name__} has {positions} positions: after a prompt of {prompt} tokens there is room for {room} new "
            f"ones, and continue_for is {most}; write fewer, or give shorter prompts (window)"
        )


class GeneratingReading(Reading):
    """Running results over what a model writes after each prompt.

    Attributes:
        new_tokens: written so far, over all prompts.
    """

    NOTES = (*Reading.NOTES, "new_tokens")

    def __init__(
        self,
        whole: Any,
        most: int,
        model: nn.Module,
        sites: list[SiteInfo],
        options: Options,
        layout: BatchLayout,
        refused: Collection[str] = (),
    ) -> None:
        super().__init__(model, sites, replace(options, groups=frozenset({ATTENTION})), layout, refused)
        self.whole = whole
        self.most = most
        self.new_tokens = 0
        self._passes: list[list[QueryResult]] = [[] for _ in sites]
        self._real = self._special = self._going = torch.zeros(0, 0, dtype=torch.bool)
        self._ends = _ends(whole)
        self._pass = 0

    def forward(
        self,
        inputs: dict[str, Any],
        special: Tensor | None,
        sampled: Any,
        windows: Sequence[int],
        numbers: RowNumbers | None = None,
        target_special: Tensor | None = None,
        alone: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        """Let the model write after each row's prompt, and add its queries to the results."""
        del sampled, target_special, alone
        prompts = model_inputs(self.model, inputs)
        ids = prompts["input_ids"]
        real = prompts.get("attention_mask", torch.ones_like(ids)).bool()
        check_room(self.model, int(real.sum(dim=1).max()), self.most)
        marks = torch.zeros_like(real) if special is None else special.to(real.device)
        ids, self._real, self._special = (_left_padded(value, real) for value in (ids, real, marks))
        self._windows = windows
        self._rows = len(ids)
        self._pass = 0
        self._numbers = numbers
        self._tokens = BatchTokens({"input_ids": ids, "attention_mask": self._real.long()}, None)
        self._going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self._passes = [[] for _ in self.sites]
        self.broken = False
        before = sum(self.seconds.values())
        with self._timed("forward"):
            self._write(ids)
            for info, passes in zip(self.sites, self._passes, strict=True):
                self._add(info, passes)
            self._look_for_trouble(torch.zeros_like(self._real[:, : ids.shape[1]], dtype=torch.float32))
            inside = sum(self.seconds.values()) - before
        self.seconds["forward"] -= inside

    def _write(self, ids: Int[Tensor, "B L"]) -> None:
        padding = self.whole.generation_config.pad_token_id
        if padding is None:
            padding = self._ends[0] if self._ends else 0
        # Far apart for each batch's first window, so that no two batches draw from one seed.
        seed = self.options.seed + (self._windows[0] << 20)
        with torch.no_grad(), capturing(self.model, self._on_attention) as capture, OwnGenerator(seed), uncompiled():

            def begin(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                self._begin_pass(capture, keywords.get("input_ids", next(iter(arguments), None)))

            with hooked([self.model], before=begin):
                self.whole.generate(
                    input_ids=ids,
                    attention_mask=self._real.long(),
                    max_new_tokens=self.most,
                    num_beams=1,
                    use_cache=True,
                    pad_token_id=padding,
                    return_dict_in_generate=False,
                )
            self.unexplained |= capture.unexplained

    def _begin_pass(self, capture: Capture, ids: Tensor | None) -> None:
        """A new forward pass: its calls are numbered anew, and what it reads was written in the one before."""
        capture.fired.clear()
        if self._pass:
            if ids is None or ids.shape[1] != 1:
                raise InputError(
                    f"{type(self.whole).__name__} does not read one token a pass while it generates, as its generation "
                    "config asks; turn assisted or speculative generation off"
                )
            self._going &= ~torch.isin(ids[:, 0], torch.tensor(self._ends, device=ids.device, dtype=ids.dtype))
            self._real = torch.cat([self._real, torch.ones_like(self._real[:, :1])], 1)
            self._special = torch.cat([self._special, torch.zeros_like(self._special[:, :1])], 1)
        self._pass += 1
        self.new_tokens += int(self._going.sum())

    def _read_attention(self, call: AttentionCall) -> None:
        info = self.site_of(call)
        if info is None or call.repeated:
            return
        call = call.at(torch.tensor([call.query.shape[2] - 1], device=call.query.device))
        # A cache may have room behind the query's own key, which is the last one that any row sees.
        place = int(call.visible().any(0).any(0)[0].nonzero().max())
        keys = self._keys(place, call.key.shape[2])
        queries = Tokens(self._going[:, None], None)
        self.broken = self.broken or in_call(call, queries.real, keys.real)
        position = torch.tensor([place], device=call.query.device)
        cut = place + 1 < self._real.shape[1]
        result = self._statistics(call, queries, keys, position, True, cut)
        if cut:
            for name in _CUT & result.values.keys():
                del result.values[name]
                for group in self._wanting(Event.QUERIES):
                    group.missing(info.site.name, name, "its cache holds the latest tokens alone")
        self._passes[info.index].append(result)

    def _keys(self, place: int, length: int) -> Tokens:
        """The tokens of a pass's ``length`` keys, (B, length): the query's own at ``place``, then the cache's free room."""
        seen = min(place + 1, self._real.shape[1])
        free = torch.zeros(len(self._real), length - seen, dtype=torch.bool, device=self._real.device)
        real = torch.cat([self._real[:, -seen:], free], 1)
        special = torch.cat([self._special[:, -seen:], free], 1)
        return Tokens(real, special)

    def _add(self, info: SiteInfo, passes: list[QueryResult]) -> None:
        """Add the queries of all passes at one site, joined along the queries' dimension, to the groups."""
        # A statistic that some pass has not (its cache was cut, or it failed) is left out of all.
        names = [name for name in passes[0].values if all(name in each.values for each in passes)]
        defined = {name for name in names if name in passes[0].defined}
        result = QueryResult(
            values={name: torch.cat([each.values[name] for each in passes], -1) for name in names},
            valid=torch.cat([each.valid for each in passes], -1),
            defined={name: torch.cat([each.defined[name] for each in passes], -1) for name in defined},
            visible=torch.cat([each.visible.expand(self._rows, -1, -1) for each in passes], -1),
            broken=torch.cat([each.broken for each in passes], -1),
        )
        numbers = None if self._numbers is None else self._numbers.rows
        queries = CallQueries(info, result, self._rows, numbers)
        for group in self._wanting(Event.QUERIES):
            self._deliver(group, group.on_queries, queries)


def _ends(whole: Any) -> tuple[int, ...]:
    """The tokens that end a text."""
    ends = whole.generation_config.eos_token_id
    if ends is None:
        return ()
    if isinstance(ends, list | tuple):
        return tuple(ends)
    return (int(ends),)


def _left_padded(values: Tensor, real: Bool[Tensor, "B L"]) -> Tensor:
    """Rows with their real tokens moved to the end, in order."""
    return values.gather(1, real.int().argsort(dim=1, stable=True))
