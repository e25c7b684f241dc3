"""The laws of a statistic of one's own: `massieu.testing.statistic_checks`.

A statistic is tried on made-up attention of a few heads and tokens, and on made-up tokens of the stream: no model is needed.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.tokens import Tokens
from massieu.probing.model.unexpected import OwnFunctionError
from massieu.probing.statistics.catalogue import Catalogue
from massieu.probing.statistics.head_window import HeadWindow
from massieu.probing.statistics.own import OwnStatistic, as_own
from massieu.probing.statistics.own_groups import checked_sums, summed_over_tokens
from massieu.probing.statistics.query_means import (
    AttentionStatistics,
    Functions,
    moments_read,
    names_with_controls,
    query_statistics,
)
from massieu.probing.statistics.query_reading import QueryReading
from massieu.probing.sums.units import Units
from massieu.testing.checks import Checks, Law
from massieu.testing.everywhere import checks_with_exemptions

HEADS, KEY_HEADS, TOKENS, SIZE, PADDING = 4, 2, 12, 8, 3
ROUNDING = 1e-9
"""Relative difference of two exact ways to one number in float64."""
HALF_ROUNDINGS = 8.0
"""So many roundings of half precision may lie between a number and that of the same inputs in float64. Keys are centred in
their own precision: a rounding of each entry moves a score by at most 2^-1 ε |q||k| SIZE^-1/2, about 2 ε here, and a statistic
may read two scores and round its own result."""

WINDOW_ROUNDINGS = 64.0
"""So many of float32, in which the weights of a window are formed."""


@dataclass(frozen=True, eq=False)
class StatisticCase:
    """A statistic to check.

    Attributes:
        statistic: what `massieu.statistic` makes, or a plain function of queries.
        exempt: laws that it does not promise, by name, each with the reason: a statistic of absolute positions knows where
            padding stands.
        tokens: numbers of which the made-up tokens are, one after the other; a statistic of some tokens needs its own.
        oracle: of a statistic of queries, its numbers (B, H, L) from explicit weights (B, H, L, N), found in another way.

    Example:
        >>> import massieu
        >>> import torch
        >>> from massieu.testing import StatisticCase, statistic_checks
        >>> @massieu.statistic(scale="share")
        ... def previous(reading):
        ...     return reading.weight_where(lambda query, key: key == query - 1)
        >>> below = lambda weights: torch.nn.functional.pad(weights.diagonal(-1, -2, -1), (1, 0))
        >>> for name, check in statistic_checks(StatisticCase(previous, oracle=below)):
        ...     check()
    """

    statistic: OwnStatistic | Callable[..., Any]
    exempt: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    oracle: Callable[[Float[Tensor, "B H L N"]], Float[Tensor, "B H L"]] | None = field(default=None, kw_only=True)
    tokens: Sequence[int] = field(default=(1, 2, 3, 4, 5), kw_only=True)

    @property
    def own(self) -> OwnStatistic:
        """The statistic with what is said of it."""
        return as_own(self.statistic)


def statistic_checks(case: StatisticCase) -> Checks:
    """Named checks of a statistic of one's own.

    * returns: what is needed, a number where it is defined, somewhere at the least;
    * oracle: the numbers of explicit weights, where the case has one;
    * leaves its input: nothing that it was given is changed;
    * its control, where that is a function: the statistic can be made of what it returns;
    * batch size; padding on the right; padding on the left; some queries: numbers of real tokens stay as they were;
    * a soft cap far above all scores, which changes nothing;
    * key origin: a vector added to all keys of a head changes nothing, unless it is said to;
    * half precision: bfloat16 and float16 give what float64 gives of the same numbers;
    * a query of NaN; one key; another thread;
    * two processes: sums of two parts, one of them stored and read again, are those of the whole.

    What a kind of statistic does not have is in ``left_out``, with the reason.

    Example:
        >>> import massieu
        >>> from massieu.testing import StatisticCase, statistic_checks
        >>> @massieu.statistic(scale="share")
        ... def previous(reading):
        ...     return reading.weight_where(lambda query, key: key == query - 1)
        >>> checks = statistic_checks(StatisticCase(previous))
        >>> checks["batch size"]()
        >>> checks.left_out["oracle"]
        'the case has no oracle'

    Raises:
        InputError: the case holds no statistic.
    """
    if not isinstance(case, StatisticCase):
        raise InputError(f"case must be a StatisticCase, got {type(case).__name__}")
    return checks_with_exemptions(case, _Trial, _LAWS)


@dataclass(frozen=True, eq=False)
class _Trial:
    case: StatisticCase

    @cached_property
    def own(self) -> OwnStatistic:
        return self.case.own

    @cached_property
    def functions(self) -> Functions:
        functions = Catalogue({self.own.name: self.own}).query_functions
        return {self.own.name: functions[self.own.name]} if self.own.of == "queries" else {}

    def reading(self, call: AttentionCall, real: Bool[Tensor, "B N"], places: Tensor | None = None) -> QueryReading:
        """The call as the statistic sees it; tokens are numbered so that some are the same."""
        places = torch.arange(real.shape[1]) if places is None else places
        named = torch.tensor(self.case.tokens)
        ids = torch.where(real, named[places % len(named)], 0).expand_as(real)
        special = (places == places[real[0]][0]).expand_as(real)
        tokens = Tokens(real, special, ids)
        return QueryReading(call, tokens, tokens, torch.arange(real.shape[1]), True, moments_read(self.functions))

    def numbers(self, reading: QueryReading) -> Float[Tensor, "B H L"]:
        """The statistic in float64, NaN where it is not defined."""
        found = query_statistics(reading, self.functions)
        if self.own.name not in found.values:
            raise AssertionError("returns: None, of attention of ordinary size, with tokens")
        values = found.values[self.own.name].double()
        return torch.where(found.defined[self.own.name], values, torch.nan)

    def measured(self, given: Any) -> Float[Tensor, "*numbers"]:
        """What the statistic makes of a reading, of a window, or of the tokens before and after a step."""
        if self.own.of == "queries":
            return self.numbers(given)
        if self.own.of == "window":
            total, count = checked_sums(self.own.function(given), given.call.query.shape[1])
            return torch.stack([total.double(), count.double()])
        return torch.tensor(summed_over_tokens(self.own, *given), dtype=torch.float64)

    def plain(self, **changes: Any) -> Any:
        """What the statistic is given, of ordinary numbers."""
        return self.given(_call(**changes))

    def given(self, call: AttentionCall) -> Any:
        """What the statistic is given, of a call without padding."""
        real = torch.ones(call.query.shape[0], call.key.shape[2], dtype=torch.bool)
        if self.own.of == "queries":
            return self.reading(call, real)
        if self.own.of == "window":
            return HeadWindow(call.rows(slice(0, 1)), real[0], torch.arange(real.shape[1]), 7)
        states = call.query[0].transpose(0, 1).flatten(1).double()
        return states, states + call.output[0].flatten(1).double()


def _call(
    batch: int = 2, tokens: int = TOKENS, dtype: torch.dtype = torch.float64, log_weight: Tensor | None = None
) -> AttentionCall:
    """Causal attention of grouped heads, or with a mask of its own."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(batch, heads, tokens, SIZE, generator=generator, dtype=torch.float64).to(dtype)

    query, key, value = drawn(HEADS), drawn(KEY_HEADS), drawn(KEY_HEADS)
    keys, values = (part.double().repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query.double(), keys, values, is_causal=True)
    site, scale, output = AttentionSite("made up"), SIZE**-0.5, output.transpose(1, 2).to(dtype)
    causal = log_weight is None
    return AttentionCall(site, nn.Identity(), query, key, value, log_weight, causal, scale, None, None, output)


def _padded(call: AttentionCall, before: int, after: int) -> tuple[AttentionCall, Bool[Tensor, "B N"]]:
    """The same tokens with padding around them, which a mask shuts; and which tokens are real."""
    batch, length = call.query.shape[0], call.query.shape[2]
    total = before + length + after
    real = torch.zeros(batch, total, dtype=torch.bool)
    real[:, before : before + length] = True
    seen = torch.ones(total, total, dtype=torch.bool).tril() & real[:, None, None]

    def around(part: Tensor, dim: int) -> Tensor:
        shape = list(part.shape)
        shape[dim] = total
        wide = torch.full(shape, 3.0, dtype=part.dtype)
        wide.narrow(dim, before, length).copy_(part)
        return wide

    parts = {name: around(getattr(call, name), 2) for name in ("query", "key", "value")}
    return replace(call, **parts, output=around(call.output, 1), log_weight=seen, is_causal=False), real


def _same(law: str, found: Tensor, expected: Tensor, tolerance: float = ROUNDING) -> None:
    """Fail where numbers differ by more than the tolerance, relative to the largest of them, or in where they are defined."""
    if found.shape != expected.shape:
        raise AssertionError(f"{law}: got shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not torch.equal(found.isnan(), expected.isnan()):
        raise AssertionError(f"{law}: it is defined at other queries")
    known = ~expected.isnan()
    if not bool(known.any()):
        return
    largest = float(expected[known].abs().amax().clamp_min(1e-30))
    error = float((found - expected)[known].abs().amax())
    if not error <= tolerance * largest:
        raise AssertionError(f"{law}: the numbers differ by up to {error:.3g}, where the largest is {largest:.3g}")


def _returns(trial: _Trial) -> None:
    found = trial.measured(trial.plain())
    if not bool(found.isfinite().any()):
        raise AssertionError("returns: it is defined nowhere, of attention of ordinary size")
    if bool(found.isinf().any()):
        raise AssertionError("returns: it is infinite, of attention of ordinary size; NaN says that it is not defined")


def _some_queries(trial: _Trial) -> None:
    call, places = _call(), torch.tensor([1, 4, 9])
    whole, real = trial.reading(call, torch.ones(2, TOKENS, dtype=torch.bool)), torch.ones(2, TOKENS, dtype=torch.bool)
    tokens = whole.queries
    asked = Tokens(
        real[:, places], None if tokens.special is None else tokens.special[:, places], _at(tokens.ids, places)
    )
    part = replace(whole, call=call.at(places), queries=asked, positions=places)
    _same("some queries: numbers as among all", trial.numbers(part), trial.numbers(whole)[:, :, places])


def _at(ids: Tensor | None, places: Tensor) -> Tensor | None:
    return None if ids is None else ids[:, places]


def _soft_cap(trial: _Trial) -> None:
    """A cap that is far above all scores changes nothing; key origins matter with one, so keys are not centred."""
    call = _call()
    found = trial.measured(trial.given(replace(call, softcap=1e5)))
    _same("a soft cap far above all scores", found, trial.measured(trial.given(call)), 1e-6)


def _control(trial: _Trial) -> None:
    given = trial.plain()
    if trial.own.of == "queries":
        called = [name for name in names_with_controls(trial.functions) if "/" in name]
        found = query_statistics(given, trial.functions).values
        if not all(name in found for name in called):
            raise AssertionError("its control: it gives no number, of attention of ordinary size")
        return
    assert trial.own.control is not None
    other = trial.own.control(*given) if trial.own.of == "step" else trial.own.control(given)
    if other is not None:
        trial.measured(other)


def _oracle(trial: _Trial) -> None:
    assert trial.case.oracle is not None
    call = _call()
    key = call.key.repeat_interleave(HEADS // KEY_HEADS, 1)
    scores = (call.scale * call.query @ key.mT).masked_fill(~call.visible(), -torch.inf)
    _same(
        "oracle: the numbers of explicit weights",
        trial.measured(trial.given(call)),
        trial.case.oracle(scores.softmax(-1)),
    )


def _leaves_its_input(trial: _Trial) -> None:
    given = trial.plain()
    tensors = (
        [given.call.query, given.call.key, given.call.value, given.call.output] if trial.own.of != "step" else [*given]
    )
    before = [each.clone() for each in tensors]
    try:
        trial.measured(given)
    except OwnFunctionError as error:
        raise AssertionError(f"leaves its input: {error}") from error
    if not all(torch.equal(*pair) for pair in zip(before, tensors, strict=True)):
        raise AssertionError("leaves its input: a tensor that it was given has changed, which is the model's own")


def _batch_size(trial: _Trial) -> None:
    call = _call()
    alone = [trial.measured(trial.given(call.rows(slice(row, row + 1)))) for row in range(2)]
    _same("batch size: two sequences together = each alone", trial.measured(trial.given(call)), torch.cat(alone))


def _padding(name: str, before: int, after: int) -> Callable[[_Trial], None]:
    def check(trial: _Trial) -> None:
        call = _call()
        wide, real = _padded(call, before, after)
        found = trial.numbers(trial.reading(wide, real, torch.arange(real.shape[1]) - before))
        _same(f"{name}: real tokens' numbers", found[:, :, before : before + TOKENS], trial.measured(trial.given(call)))

    return check


def _key_origin(trial: _Trial) -> None:
    call = _call()
    moved = replace(call, key=call.key + torch.linspace(-2.0, 2.0, SIZE, dtype=torch.float64))
    known = trial.measured(trial.given(call))
    tolerance = 1e-7 if trial.own.of == "queries" else WINDOW_ROUNDINGS * torch.finfo(torch.float32).eps
    _same("key origin: a vector added to all keys", trial.measured(trial.given(moved)), known, tolerance)


def _half_precision(trial: _Trial) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half = _call(dtype=dtype)
        parts = {name: getattr(half, name).double() for name in ("query", "key", "value", "output")}
        expected = trial.measured(trial.given(replace(half, **parts)))
        found = trial.measured(trial.given(half))
        _same(f"half precision: {dtype} = float64", found, expected, HALF_ROUNDINGS * torch.finfo(dtype).eps)


def _query_of_nan(trial: _Trial) -> None:
    call = _call()
    query = call.query.clone()
    query[0, 1, 5] = torch.nan
    found, expected = trial.measured(trial.given(replace(call, query=query))), trial.measured(trial.given(call))
    if trial.own.of == "queries":
        if not bool(found[0, 1, 5].isnan()):
            raise AssertionError("a query of NaN: it has a number at a query without one")
        expected[0, 1, 5] = torch.nan
        _same("a query of NaN: other queries' numbers", found, expected)
    elif trial.own.of == "window":
        heads = torch.arange(HEADS) != 1
        _same("a query of NaN: other heads' sums", found[:, heads], expected[:, heads])


def _one_key(trial: _Trial) -> None:
    found = trial.measured(trial.plain(tokens=1))
    if bool(found.isinf().any()):
        raise AssertionError("one key: it is infinite where a query sees one key; NaN says that it is not defined")


def _another_thread(trial: _Trial) -> None:
    with ThreadPoolExecutor(1) as threads:
        found = [threads.submit(lambda: trial.measured(trial.plain())).result()]
    _same("another thread: the numbers", found[0], trial.measured(trial.plain()))


def _two_processes(trial: _Trial) -> None:
    def begun() -> AttentionStatistics:
        return AttentionStatistics(names_with_controls(trial.functions), HEADS, Units(), TOKENS)

    def add(to: AttentionStatistics, rows: slice, numbers: range) -> None:
        call = _call(batch=4).rows(rows)
        to.update(query_statistics(trial.given(call), trial.functions), torch.arange(TOKENS), len(numbers), numbers)

    whole, first, other = begun(), begun(), begun()
    add(whole, slice(0, 4), range(4))
    add(first, slice(0, 2), range(2))
    add(other, slice(2, 4), range(2, 4))
    read = begun()
    read.restore(pickle.loads(pickle.dumps(other.state())))
    first.merge(read)
    one, two = (torch.from_numpy(each.ratio.estimate().value) for each in (whole, first))
    _same("two processes: sums of two parts = sums of the whole", two, one)


def _only(*kinds: str) -> Callable[[StatisticCase], str | None]:
    def missing(case: StatisticCase) -> str | None:
        of = case.own.of
        return None if of in kinds else f"a statistic of a {of} is given one at a time"

    return missing


def _no_control(case: StatisticCase) -> str | None:
    return "it has no control of its own" if case.own.control is None else None


def _capped(case: StatisticCase) -> str | None:
    return _only("queries", "window")(case) or _depends(case)


def _no_oracle(case: StatisticCase) -> str | None:
    if case.own.of != "queries":
        return "an oracle is for statistics of queries"
    return "the case has no oracle" if case.oracle is None else None


def _depends(case: StatisticCase) -> str | None:
    if case.own.of == "step":
        return "a step has no keys"
    return "it is said to depend on it" if case.own.metadata.gauge_dependent else None


_LAWS: list[Law[StatisticCase, _Trial]] = [
    Law("returns", _returns),
    Law("oracle", _oracle, _no_oracle),
    Law("its control", _control, _no_control),
    Law("leaves its input", _leaves_its_input),
    Law("batch size", _batch_size, _only("queries")),
    Law("padding on the right", _padding("padding on the right", 0, PADDING), _only("queries")),
    Law("padding on the left", _padding("padding on the left", PADDING, 0), _only("queries")),
    Law("some queries", _some_queries, _only("queries")),
    Law("key origin", _key_origin, _depends),
    Law("a soft cap", _soft_cap, _capped),
    Law("half precision", _half_precision, _only("queries", "window")),
    Law("a query of NaN", _query_of_nan, _only("queries", "window")),
    Law("one key", _one_key),
    Law("another thread", _another_thread),
    Law("two processes", _two_processes, _only("queries")),
]
