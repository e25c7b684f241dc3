"""Is what heads learn from n sequences free of how long the sequences are? (E20, Z10)"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise, slope
from massieu.papers.theory import attention_lipschitz, generalisation_bound

SIZE, RADIUS, NOISE = 3, 2.0, 0.1
SEQUENCES, LENGTHS = (64, 128, 256, 512, 1024, 2048), (8, 32, 128)
_LENGTH, _NUMBER, _COPIES, _TEST, _REFERENCE = 16, 512, 8, 512, 2**19
_NORM = 3.0
"""The bound is taken for parameters of that norm."""
_Parameters = list[Tensor]
_Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens (copies, n, L, d), queries (copies, n, 1, d), targets (copies, n, d)."""


@experiment(
    "length-free",
    question="Do a head's parameter error and generalisation gap fall with more sequences, and not grow with longer ones?",
    claims="E20, Z10",
    minutes=8,
    criteria=[
        Criterion("supervised_slope", "slope of log parameter error on log n, supervised", least=-0.6, most=-0.4),
        Criterion("masked_slope", "slope of log parameter error on log n, masked", least=-0.6, most=-0.4),
        Criterion("supervised_growth", "slope of log parameter error on log L, supervised", most=0.1),
        Criterion("masked_growth", "slope of log parameter error on log L, masked", most=0.1),
        Criterion("supervised_gap_growth", "slope of log gap on log L, supervised", most=0.1),
        Criterion("masked_gap_growth", "slope of log gap on log L, masked", most=0.1),
        Criterion("gap_over_bound", "largest gap over Z10's bound", most=1.0),
        Criterion(
            "above_best",
            "largest relative excess of empirical risk over the best parameters'",
            most=1e-3,
            role="optimisation",
        ),
        Criterion(
            "positional_gap_growth",
            "slope of log gap on log L with a trained weight for each position",
            most=0.1,
            role="control",
        ),
    ],
)
def length_free(seed: int, quick: bool) -> Numbers:
    """A head with a score matrix and a value matrix (3×3) sees tokens of norm at most 2, spread about a centre of their
    sequence. Supervised: its target is the output of another such head, plus noise. Masked: its target is one more token of
    the sequence; tokens have one of two precisions, which their third coordinate shows. Parameters minimise the squared
    error over n sequences: 64 to 2,048 sequences of 16 tokens, then 512 sequences of 8 to 128 tokens, 8 samples each. The
    parameter error is measured between outputs, because some directions of the parameters hardly change them. The reference
    is the other head or, in the masked task, parameters fitted to sequences with 524,288 tokens together. The gap is the
    error on new sequences minus the error on the n. From both the error of the best parameters is subtracted, which does
    not change the mean.
    """
    drawn = torch.Generator().manual_seed(seed)
    lengths, numbers_of = (LENGTHS[:2], SEQUENCES[:2]) if quick else (LENGTHS, SEQUENCES)
    n_axis, length_axis = (torch.tensor(axis, dtype=torch.float64).log() for axis in (numbers_of, lengths))
    found: Numbers = {}
    bounded: list[_Cell] = []
    for task in _tasks(drawn, 40 if quick else 400):
        by_length = [_Cell(task, task.best(length), _NUMBER, length) for length in lengths]
        found[f"{task.name}_gap_growth"] = slope(length_axis, _logs(cell.gap for cell in by_length))
        found |= {f"{task.name}_gap_at_{length}": cell.gap for length, cell in zip(lengths, by_length, strict=True)}
        if task.name != "positional":
            best = task.best(_LENGTH)
            by_number = [_Cell(task, best, number, _LENGTH) for number in numbers_of]
            found[f"{task.name}_slope"] = slope(n_axis, _logs(cell.error for cell in by_number))
            found[f"{task.name}_gap_slope"] = slope(n_axis, _logs(cell.gap for cell in by_number))
            found[f"{task.name}_growth"] = slope(length_axis, _logs(cell.error for cell in by_length))
            found[f"{task.name}_distance_slope"] = slope(n_axis, _logs(cell.distance for cell in by_number))
            found[f"{task.name}_distance_growth"] = slope(length_axis, _logs(cell.distance for cell in by_length))
            found |= {f"{task.name}_error_of_{n}": cell.error for n, cell in zip(numbers_of, by_number, strict=True)}
            bounded += by_number + by_length
    found["gap_over_bound"] = max(cell.gap_over_bound for cell in bounded)
    found["above_best"] = max(cell.above_best for cell in bounded)
    return found


@dataclass(frozen=True)
class _Task:
    """Attributes:
    sample: From copies, n and L.
    output: Of the head, from its parameters.
    start: Parameters at the start, from L.
    truth: The best ones, where they are known.
    """

    name: str
    sample: Callable[[int, int, int], _Batch]
    output: Callable[[_Parameters, _Batch], Float64[Tensor, "copies n d"]]
    start: Callable[[int], _Parameters]
    steps: int
    truth: _Parameters | None = None

    def best(self, length: int) -> _Parameters:
        if self.truth is not None:
            return self.truth
        return self.fitted(self.sample(1, _REFERENCE // length, length))

    def fitted(self, batch: _Batch) -> _Parameters:
        """Of least empirical risk, each copy its own."""
        copies, length = batch[0].shape[0], batch[0].shape[2]
        parameters = [p.repeat(copies, 1, 1, 1).requires_grad_() for p in self.start(length)]
        minimise(lambda: self.loss(parameters, batch).sum(), parameters, steps=self.steps, step_size=0.05)
        return [parameter.detach() for parameter in parameters]

    def loss(self, parameters: _Parameters, batch: _Batch) -> Float64[Tensor, " copies"]:
        return (self.output(parameters, batch) - batch[2]).square().sum(-1).mean(-1)


def _by_score(parameters: _Parameters, batch: _Batch) -> Tensor:
    score, value = parameters
    tokens, queries, _ = batch
    return (ops.attention(queries @ score, tokens, tokens, scale=1.0).output @ value).squeeze(-2)


def _by_position(parameters: _Parameters, batch: _Batch) -> Tensor:
    weights, value = parameters
    return (weights @ batch[0] @ value).squeeze(-2)


def _tasks(drawn: torch.Generator, steps: int) -> list[_Task]:
    options = {"generator": drawn, "dtype": torch.float64}
    truth = [torch.eye(SIZE).double() + torch.randn(SIZE, SIZE, **options) / 4 for _ in range(2)]
    pointer = torch.eye(SIZE, dtype=torch.float64)[-1:]

    def spread(copies: int, number: int, length: int, noise: Tensor | float) -> Tensor:
        centre = torch.randn(copies, number, 1, SIZE, **options) / 2
        return centre + noise * torch.randn(copies, number, length, SIZE, **options)

    def supervised(copies: int, number: int, length: int) -> _Batch:
        tokens = _bounded(spread(copies, number, length, 1.0))
        queries = _bounded(torch.randn(copies, number, 1, SIZE, **options))
        clean = _by_score(truth, (tokens, queries, tokens))
        return tokens, queries, clean + NOISE * torch.randn(clean.shape, **options)

    def masked(copies: int, number: int, length: int) -> _Batch:
        precise = torch.rand(copies, number, length + 1, 1, generator=drawn) < 0.5
        tokens = spread(copies, number, length + 1, torch.where(precise, 0.2, 0.8).double())
        tokens = _bounded(torch.cat([tokens[..., :-1], precise.double()], -1))
        return tokens[..., :-1, :], pointer.expand(copies, number, 1, SIZE), tokens[..., -1, :]

    half = torch.eye(SIZE, dtype=torch.float64)[None, None] / 2
    scored = lambda _: [0 * half, half]  # noqa: E731
    placed = lambda length: [half.new_full((1, 1, 1, length), 1 / length), half]  # noqa: E731
    return [
        _Task("supervised", supervised, _by_score, scored, steps, truth),
        _Task("masked", masked, _by_score, scored, steps),
        _Task("positional", supervised, _by_position, placed, steps),
    ]


def _bounded(tokens: Tensor) -> Tensor:
    return tokens * (RADIUS / tokens.norm(dim=-1, keepdim=True)).clamp_max(1.0)


class _Cell:
    """Heads trained on samples of n sequences of length L.

    Attributes:
        error: Root mean square distance of outputs from those with the best parameters.
        distance: The same of the parameters themselves.
        gap: Error on other sequences less that on the n, both less the best parameters'; mean over copies.
        above_best: Empirical risk above that of the best parameters, over it, at its largest.
        gap_over_bound: Largest gap of a copy over the bound.
    """

    def __init__(self, task: _Task, best: _Parameters, number: int, length: int) -> None:
        best = [parameter.expand(_COPIES, 1, -1, -1) for parameter in best]
        batch, test = task.sample(_COPIES, number, length), task.sample(_COPIES, _TEST, length)
        found = task.fitted(batch)
        on_own, best_on_own = task.loss(found, batch), task.loss(best, batch)
        on_other, best_on_other = task.loss(found, test), task.loss(best, test)
        self.gap = float((on_other - best_on_other + best_on_own - on_own).mean())
        self.above_best = float((on_own / best_on_own - 1).max())
        self.error = float((task.output(found, test) - task.output(best, test)).square().sum(-1).mean()) ** 0.5
        apart = sum((a - b).square().sum((1, 2, 3)).mean() for a, b in zip(found, best, strict=True))
        self.distance = float(apart) ** 0.5
        self.gap_over_bound = float((on_other - on_own).max()) / _bound(number)


def _bound(number: int) -> float:
    """Z10's, for parameters of norm at most `_NORM` each; a squared error is at most (2·R·norm)²."""
    largest = 2 * RADIUS * _NORM
    lipschitz = attention_lipschitz(RADIUS, _NORM)
    return generalisation_bound(
        2 * SIZE**2,
        _NORM,
        number,
        lipschitz=lipschitz.value + lipschitz.score,
        loss_range=largest**2,
        loss_lipschitz=2 * largest,
    )


def _logs(numbers: Iterable[float]) -> Float64[Tensor, " n"]:
    return torch.tensor([max(number, 1e-12) for number in numbers], dtype=torch.float64).log()
