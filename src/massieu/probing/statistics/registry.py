"""Every statistic of the probe: name, formula, claim, which question it answers, what it does not say, what it costs.

Each is registered where it is computed, by `Register.statistic`. The tables' rows, the command ``massieu statistics``, the
page's methods section and the table in ``docs/how-to/probe.md`` are made from the registry. Of the group "attention" each
statistic is computed if it is named. The statistics of another group are computed together, if any of them is named.

Notation: one query sees n keys with scores s_j = β q·k_j and log-weights log w_j; h_j = w_j / Σw, p = softmax(s + log w),
log Z = log Σ w_j e^{s_j}. r is the residual stream, Δ what a head or a whole attention layer adds to it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from massieu.probing.sums.random_heads import Scale
from massieu.storage.record import Statistic

ATTENTION = "attention"
VALUES = "values"
CLIMB = "climb"
MAPS = "maps"
EXPANSION = "expansion"
REPLACEMENT = "replacement"
REPEATED = "repeated"
MEMORY = "memory"
FEED_FORWARD = "feed_forward"
CONDITIONAL_MEAN = "conditional_mean"
KEY_DENSITY = "key_density"
JOINT = "joint"
UNCERTAINTY = "uncertainty"
METRIC = "metric"
FLOW = "flow"
RESIDUAL = "residual"
TAP = "tap"
RESPONSE = "response"
SYMMETRY = "symmetry"
SUFFICIENCY = "sufficiency"
GROUPS = (
    ATTENTION,
    VALUES,
    CLIMB,
    MAPS,
    EXPANSION,
    REPLACEMENT,
    REPEATED,
    MEMORY,
    FEED_FORWARD,
    CONDITIONAL_MEAN,
    KEY_DENSITY,
    JOINT,
    UNCERTAINTY,
    METRIC,
    FLOW,
    RESIDUAL,
    TAP,
    RESPONSE,
    SYMMETRY,
    SUFFICIENCY,
)
"""The package's groups, in the order of the tables."""
OWN_WINDOWS = "own_windows"
"""The group of the user's own functions of sampled windows."""
OWN_STEPS = "own_steps"
"""The group of the user's own functions of steps of the stream."""


@dataclass(frozen=True)
class Kind:
    """Metadata of a group.

    Attributes:
        cost: what it takes to compute it.
        sampled: it is measured on the sampled windows.
        opt_in: it is computed only if one of its statistics is named.
        question: its statistics answer a question of the papers, and are tested together.
    """

    cost: str
    sampled: bool = False
    opt_in: bool = False
    question: bool = False


_question = partial(Kind, sampled=True, opt_in=True, question=True)
KINDS: dict[str, Kind] = {
    ATTENTION: Kind("every query: one more pass over the scores"),
    VALUES: Kind("every token: norms of the values; the sample: norms of the writes"),
    CLIMB: Kind("the sample: two gradients per head, one replay of the queries per head", sampled=True),
    MAPS: Kind("once per attention site, from the weights"),
    EXPANSION: Kind("the sample: distances and one small spectrum per point of the residual stream", sampled=True),
    REPLACEMENT: Kind("only when named: a forward pass for each head on each of 16 windows", opt_in=True),
    REPEATED: Kind(
        "only when named: 16 made-up sequences of 100 tokens, and small matrices once per attention site", opt_in=True
    ),
    MEMORY: _question("only when named; the sample: weights of 16 queries, distances of keys, 24 products with them"),
    CONDITIONAL_MEAN: _question("only when named; the sample: one spectrum, 7 kernels of at most 256 tokens"),
    KEY_DENSITY: _question(
        "only when named; the sample: densities of at most 256 keys, 16 steps of expectation and maximisation"
    ),
    JOINT: _question("only when named; the sample: scores of 64 queries"),
    UNCERTAINTY: _question("only when named; the sample: weights of 16 queries, 24 products with keys and values"),
    METRIC: _question("only when named; the sample: one covariance of at most 1,024 keys, weights of 64 queries"),
    FLOW: _question("only when named; the sample: at every step projections of 64 tokens and of as many Gaussian ones"),
    RESIDUAL: _question("only when named; the sample: one gradient per head"),
    TAP: _question("only when named; the sample: weights of 64 queries"),
    RESPONSE: _question(
        "only when named; 8 windows again with gradients: of 2 tokens' states, to each layer and to all before them"
    ),
    SYMMETRY: _question("only when named; 16 windows again, each in 2 orders, and twice more to find position numbers"),
    SUFFICIENCY: _question("only when named; 16 windows again, with their context in another order and drawn anew"),
    FEED_FORWARD: _question("only when named; at most 2,048 tokens: each layer once, 2 derivatives, 4 regressions"),
    OWN_WINDOWS: Kind("the sample: a function of the user's own", sampled=True, opt_in=True),
    OWN_STEPS: Kind("the sample: a function of the user's own, at every step", sampled=True, opt_in=True),
}
QUESTION_GROUPS = frozenset(name for name, kind in KINDS.items() if kind.question)
"""Groups that answer a question of the papers: the statistics of one are tested together."""
SAMPLED = frozenset(name for name, kind in KINDS.items() if kind.sampled)
"""Groups that are measured on the sampled windows."""
OPT_IN = frozenset(name for name, kind in KINDS.items() if kind.opt_in)
"""Groups that are computed only if one of their statistics is named."""
SHIM = "Shim, A Probabilistic Interpretation of Transformers (arXiv 2205.01080)"
BAL = "Bal, Transformer Attention as an Implicit Mixture of Effective Energy-Based Models (2020)"
ZHANG = "Zhang et al., An Analysis of Attention via the Lens of Exchangeability and Latent Variable Models (arXiv 2212.14852)"
OWN = "derived in docs/theory/index.md"

_DESCRIPTION = "Describes this text and this model; weight on a token is not information from it."
_KEY_ORIGIN = (
    "Depends on the key origin: adding one vector to all keys of a head moves it and leaves attention as it is."
)
F = TypeVar("F", bound=Callable[..., object])


STATISTICS: dict[str, Statistic] = {}
"""The package's statistics, by name."""
ALWAYS_READ = ("log_partition", "entropy")
"""The moments that tell which queries have finite numbers."""
NEEDS_SCORES: set[str] = set()
"""Statistics of the attention that have no meaning where scores are not known apart from log-weights."""
MOMENTS: dict[str, tuple[str, ...]] = {}
"""The moments that each statistic of the attention reads beside `ALWAYS_READ`."""


class Register(Generic[F]):
    """The statistics of one group whose functions have one signature, each registered where it is defined.

    Attributes:
        functions: by the statistics' names, in the order of registration.
    """

    def __init__(self, group: str) -> None:
        if group not in KINDS:
            raise ValueError(f"{group!r} is no group")
        self.group = group
        self.functions: dict[str, F] = {}

    def statistic(
        self,
        title: str,
        *,
        formula: str,
        claim: str,
        paper: str = OWN,
        name: str | None = None,
        question: str | None = None,
        caveat: str | None = None,
        unit: str = "",
        control: str | None = "reinitialised",
        headline: bool | None = None,
        gauge_dependent: bool = False,
        signed: bool = False,
        scope: str = "head",
        needs_scores: bool = False,
        moments: tuple[str, ...] = (),
        scale: Scale | None = None,
        smallest: float | None = None,
    ) -> Callable[[F], F]:
        """Register the function as a statistic; `Statistic` says what each entry means.

        Args:
            name: by default the function's name.
            question: by default the function's docstring.
            caveat: by default that it describes this text, or that it depends on the key origin.
            needs_scores: whether it has no meaning where scores are not known apart from log-weights.
            moments: those of `ops.attention_moments` that it reads besides `ALWAYS_READ`.
            headline: by default whether it is independent of the key origin.
            scale: by default "number" if it is signed, else "positive" if it has a unit, else "share".
            smallest: by default 0.05 for a share or a number without unit, 0.1 for one with a unit, a tenth for a positive
                number.

        Raises:
            ValueError: the name is taken, or a headline depends on the key origin.
        """

        def register(measure: F) -> F:
            statistic_name = name or measure.__name__
            if statistic_name in STATISTICS:
                raise ValueError(f"statistic {statistic_name!r}: the name is taken")
            if gauge_dependent and headline:
                raise ValueError(f"statistic {statistic_name!r} depends on the key origin and cannot be a headline")
            if needs_scores:
                NEEDS_SCORES.add(statistic_name)
            statistic_scale = scale or _default_scale(signed, unit)
            STATISTICS[statistic_name] = Statistic(
                name=statistic_name,
                title=title,
                formula=formula,
                claim=claim,
                paper=paper,
                group=self.group,
                question=question or (measure.__doc__ or "").strip(),
                caveat=caveat or caveat_of(gauge_dependent),
                unit=unit,
                scope=scope,
                headline=not gauge_dependent if headline is None else headline,
                gauge_dependent=gauge_dependent,
                signed=signed,
                control=control,
                cost=KINDS[self.group].cost,
                scale=statistic_scale,
                smallest=smallest or smallest_of(unit, statistic_scale),
                sampled=KINDS[self.group].sampled,
            )
            self.functions[statistic_name] = measure
            MOMENTS[statistic_name] = moments
            return measure

        return register


def _default_scale(signed: bool, unit: str) -> Scale:
    if signed:
        return "number"
    return "positive" if unit else "share"


def caveat_of(gauge_dependent: bool) -> str:
    """The default caveat of a statistic."""
    return _KEY_ORIGIN if gauge_dependent else _DESCRIPTION


def smallest_of(unit: str, scale: str) -> float:
    """The default of the smallest difference from a control that is announced."""
    return 0.1 if unit or scale == "positive" else 0.05


def moments_of(names: Collection[str]) -> tuple[str, ...]:
    """The moments that these statistics read, each once."""
    return tuple(dict.fromkeys([*ALWAYS_READ, *(moment for name in names for moment in MOMENTS[name])]))
