"""Is what heads learn from n sequences free of how long the sequences are? (E20, Z10)"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise, slope
from massieu.papers.theory import attention_lipschitz, generalisation_bound

SIZE = 3
RADIUS = 2.0
"""The largest norm of a token."""
NOISE = 0.1
SEQUENCES = (64, 128, 256, 512, 1024, 2048)
"""Numbers of sequences n, at the length `_LENGTH`."""
LENGTHS = (8, 32, 128)
"""Lengths L, at `_NUM_SEQUENCES` sequences."""
_LENGTH = 16
_NUM_SEQUENCES = 512
_COPIES = 8
"""Independent samples that heads are fitted to."""
_TEST_SEQUENCES = 512
_REFERENCE_TOKENS = 2**19
"""Tokens that the best parameters are fitted to, where they are not known."""
_NORM = 3.0
"""The norm of each parameter for which the bound is taken."""
_Parameters = list[Tensor]


class _Batch(NamedTuple):
    """n sequences of L tokens, for each copy."""

    tokens: Float64[Tensor, "copies n L d"]
    queries: Float64[Tensor, "copies n 1 d"]
    targets: Float64[Tensor, "copies n d"]


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
    generator = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[:2] if quick else LENGTHS
    sequences = SEQUENCES[:2] if quick else SEQUENCES
    log_lengths = torch.tensor(lengths, dtype=torch.float64).log()
    log_sequences = torch.tensor(sequences, dtype=torch.float64).log()
    numbers: Numbers = {}
    bounded: list[_Fits] = []
    for task in _tasks(generator, 40 if quick else 400):
        by_length = [_Fits(task, task.best(length), _NUM_SEQUENCES, length) for length in lengths]
        numbers[f"{task.name}_gap_growth"] = slope(log_lengths, _logs(fits.gap for fits in by_length))
        for length, fits in zip(lengths, by_length, strict=True):
            numbers[f"{task.name}_gap_at_{length}"] = fits.gap
        if task.name == "positional":
            continue
        best = task.best(_LENGTH)
        by_number = [_Fits(task, best, number, _LENGTH) for number in sequences]
        numbers[f"{task.name}_slope"] = slope(log_sequences, _logs(fits.error for fits in by_number))
        numbers[f"{task.name}_gap_slope"] = slope(log_sequences, _logs(fits.gap for fits in by_number))
        numbers[f"{task.name}_growth"] = slope(log_lengths, _logs(fits.error for fits in by_length))
        numbers[f"{task.name}_distance_slope"] = slope(log_sequences, _logs(fits.distance for fits in by_number))
        numbers[f"{task.name}_distance_growth"] = slope(log_lengths, _logs(fits.distance for fits in by_length))
        for number, fits in zip(sequences, by_number, strict=True):
            numbers[f"{task.name}_error_of_{number}"] = fits.error
        bounded += by_number + by_length
    numbers["gap_over_bound"] = max(fits.gap_over_bound for fits in bounded)
    numbers["above_best"] = max(fits.above_best for fits in bounded)
    return numbers


@dataclass(frozen=True)
class _Task:
    """A way to draw sequences, and a head whose parameters are fitted to them.

    Attributes:
        name: Its name in those of the numbers.
        sample: Draws a batch, from the number of copies, n and L.
        output: The head's outputs, from its parameters and a batch.
        start: The parameters at the start of training, from L.
        steps: The number of training steps.
        truth: The best parameters, where they are known.
    """

    name: str
    sample: Callable[[int, int, int], _Batch]
    output: Callable[[_Parameters, _Batch], Float64[Tensor, "copies n d"]]
    start: Callable[[int], _Parameters]
    steps: int
    truth: _Parameters | None = None

    def best(self, length: int) -> _Parameters:
        """The best parameters for sequences of this length, from many tokens where they are not known."""
        if self.truth is not None:
            return self.truth
        return self.fit(self.sample(1, _REFERENCE_TOKENS // length, length))

    def fit(self, batch: _Batch) -> _Parameters:
        """Parameters of least empirical risk, for each copy its own."""
        copies, _, length, _ = batch.tokens.shape
        parameters = [parameter.repeat(copies, 1, 1, 1).requires_grad_() for parameter in self.start(length)]
        minimise(lambda: self.loss(parameters, batch).sum(), parameters, steps=self.steps, step_size=0.05)
        return [parameter.detach() for parameter in parameters]

    def loss(self, parameters: _Parameters, batch: _Batch) -> Float64[Tensor, " copies"]:
        return (self.output(parameters, batch) - batch.targets).square().sum(-1).mean(-1)


def _softmax_head(parameters: _Parameters, batch: _Batch) -> Float64[Tensor, "copies n d"]:
    score, value = parameters
    output = ops.attention(batch.queries @ score, batch.tokens, batch.tokens, scale=1.0).output
    return (output @ value).squeeze(-2)


def _positional_head(parameters: _Parameters, batch: _Batch) -> Float64[Tensor, "copies n d"]:
    """A weight for each position, whatever the tokens are."""
    weights, value = parameters
    return (weights @ batch.tokens @ value).squeeze(-2)


def _tasks(generator: torch.Generator, steps: int) -> list[_Task]:
    options = {"generator": generator, "dtype": torch.float64}
    identity = torch.eye(SIZE, dtype=torch.float64)
    truth = [identity + torch.randn(SIZE, SIZE, **options) / 4 for _ in range(2)]

    def spread_tokens(copies: int, number: int, length: int, noise: Tensor | float) -> Tensor:
        """Tokens about a centre of their sequence, of norms without a bound."""
        centre = torch.randn(copies, number, 1, SIZE, **options) / 2
        return centre + noise * torch.randn(copies, number, length, SIZE, **options)

    def sample_supervised(copies: int, number: int, length: int) -> _Batch:
        tokens = _bounded(spread_tokens(copies, number, length, 1.0))
        queries = _bounded(torch.randn(copies, number, 1, SIZE, **options))
        outputs = _softmax_head(truth, _Batch(tokens, queries, tokens))
        return _Batch(tokens, queries, outputs + NOISE * torch.randn(outputs.shape, **options))

    def sample_masked(copies: int, number: int, length: int) -> _Batch:
        """The last token is the masked one; the last coordinate shows which tokens are precise, and the query is its axis."""
        precise = torch.rand(copies, number, length + 1, 1, generator=generator) < 0.5
        noise = torch.where(precise, 0.2, 0.8).double()
        tokens = spread_tokens(copies, number, length + 1, noise)
        tokens = _bounded(torch.cat([tokens[..., :-1], precise.double()], -1))
        queries = identity[-1:].expand(copies, number, 1, SIZE)
        return _Batch(tokens[..., :-1, :], queries, tokens[..., -1, :])

    value = identity[None, None] / 2

    def start_softmax(length: int) -> _Parameters:
        return [0 * value, value]

    def start_positional(length: int) -> _Parameters:
        return [value.new_full((1, 1, 1, length), 1 / length), value]

    return [
        _Task("supervised", sample_supervised, _softmax_head, start_softmax, steps, truth),
        _Task("masked", sample_masked, _softmax_head, start_softmax, steps),
        _Task("positional", sample_supervised, _positional_head, start_positional, steps),
    ]


def _bounded(tokens: Tensor) -> Tensor:
    """The tokens, those outside the ball of radius R moved to its sphere."""
    return tokens * (RADIUS / tokens.norm(dim=-1, keepdim=True)).clamp_max(1.0)


class _Fits:
    """Heads fitted to samples of n sequences of length L.

    Attributes:
        error: Root mean square distance of outputs from those with the best parameters.
        distance: Root mean square distance of the parameters from the best ones.
        gap: Error on new sequences minus that on the n, from both the best parameters' error subtracted; mean over copies.
        above_best: Largest relative excess of a copy's empirical risk over that of the best parameters.
        gap_over_bound: Largest gap of a copy over the bound.
    """

    def __init__(self, task: _Task, best: _Parameters, number: int, length: int) -> None:
        best = [parameter.expand(_COPIES, 1, -1, -1) for parameter in best]
        training = task.sample(_COPIES, number, length)
        test = task.sample(_COPIES, _TEST_SEQUENCES, length)
        fitted = task.fit(training)
        training_loss = task.loss(fitted, training)
        best_training_loss = task.loss(best, training)
        test_loss = task.loss(fitted, test)
        best_test_loss = task.loss(best, test)
        self.gap = float((test_loss - best_test_loss + best_training_loss - training_loss).mean())
        self.above_best = float((training_loss / best_training_loss - 1).max())
        self.error = float((task.output(fitted, test) - task.output(best, test)).square().sum(-1).mean()) ** 0.5
        squared_distance = sum((a - b).square().sum((1, 2, 3)).mean() for a, b in zip(fitted, best, strict=True))
        self.distance = float(squared_distance) ** 0.5
        self.gap_over_bound = float((test_loss - training_loss).max()) / _bound(number)


def _bound(number: int) -> float:
    """Z10's bound for parameters of norm at most `_NORM` each; a squared error is at most (2·R·norm)²."""
    largest_error = 2 * RADIUS * _NORM
    lipschitz = attention_lipschitz(RADIUS, _NORM)
    return generalisation_bound(
        2 * SIZE**2,
        _NORM,
        number,
        lipschitz=lipschitz.value + lipschitz.score,
        loss_range=largest_error**2,
        loss_lipschitz=2 * largest_error,
    )


def _logs(numbers: Iterable[float]) -> Float64[Tensor, " n"]:
    """Logarithms; a gap may be 0 or negative by chance."""
    return torch.tensor([max(number, 1e-12) for number in numbers], dtype=torch.float64).log()
