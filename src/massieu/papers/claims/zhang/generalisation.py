"""Z10: what a head's parameters do to its output, and the gap between mean and empirical loss, at every length."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.papers.claims.claim import CLOSED_FORM, ZHANG, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.papers.theory import attention_lipschitz, generalisation_bound

_LENGTHS = (8, 64, 512, 4096)
_RADIUS = 1.5
"""R, the largest norm of a token."""
_SCALE = 0.8
"""β."""


@claim(
    "Z10",
    title="Generalisation independent of input size",
    statement="Softmax is 1-Lipschitz from the maximum norm to the 1-norm. A head on tokens of norm at most R "
    "therefore changes by at most R‖W − W′‖ + βR³‖W′‖‖M − M′‖ at every length L. The gap between mean and empirical "
    "loss over n sequences has a bound √(P log n/n), in which L does not occur.",
    source=f"{ZHANG}, abstract (c); the shape by the follow-up's appendices, its constants not recovered; lemma derived",
    status="abstract only",
)
def generalisation_without_length(pairs: int = 100_000, repetitions: int = 60, seed: int = 0) -> Iterator[Check]:
    check_at_least(1000, pairs=pairs)
    # The interval of the rate is a tenth wide.
    check_at_least(60, repetitions=repetitions)
    normal = normal_draws(seed)
    yield from _softmax(normal, pairs)
    for length in _LENGTHS:
        yield from _head(normal, length)
    yield from _gap(normal, repetitions)


def _softmax(normal: Normal, pairs: int) -> Iterator[Check]:
    """Softmax is 1-Lipschitz from the maximum norm to the 1-norm, and no less."""
    ratios = []
    for size, spread in ((2, 0.1), (2, 3.0), (5, 1.0), (40, 3.0)):
        a = spread * normal(pairs // 4, size)
        b = a + spread * normal(pairs // 4, size)
        change = (a.softmax(-1) - b.softmax(-1)).abs().sum(-1)
        ratios.append((change / (a - b).abs().amax(-1)).max())
    # Beyond 1 lies rounding alone.
    yield at_most(f"softmax: largest ratio of changes in {pairs} pairs", torch.stack(ratios), 1 + CLOSED_FORM)
    near = torch.tensor([[1e-3, -1e-3], [-1e-3, 1e-3]], dtype=torch.float64)
    extreme = (near.softmax(-1)[0] - near.softmax(-1)[1]).abs().sum() / (near[0] - near[1]).abs().max()
    # It is tanh(1e-3)/1e-3.
    yield close("softmax: ratio of an even pair moved a little, and 1", extreme, 1.0, 1e-6)


def _head(normal: Normal, length: int) -> Iterator[Check]:
    """A head changes by at most R‖W − W′‖ + βR³‖W′‖‖M − M′‖ at this length: ten pairs of random heads."""
    shares = []
    for _ in range(10):
        tokens = normal(length, 3)
        tokens = _RADIUS * tokens / tokens.norm(dim=-1, keepdim=True).amax()
        (score, other_score) = normal(2, 3, 3)
        (value, other_value) = normal(2, 3, 3)
        bound = attention_lipschitz(_RADIUS, _norm(other_value), _SCALE)
        largest_change = bound.value * _norm(value - other_value) + bound.score * _norm(score - other_score)
        change = _outputs(tokens, score, value) - _outputs(tokens, other_score, other_value)
        shares.append(change.norm(dim=-1).max() / largest_change)
    yield at_most(f"L = {length}: share of the bound in use", torch.stack(shares), 1 + CLOSED_FORM)
    yield from _attained(normal, length)


def _attained(normal: Normal, length: int) -> Iterator[Check]:
    """Both terms of the bound are attained: the value's by equal tokens, the score's by two opposite halves."""
    axis = torch.tensor([_RADIUS, 0.0, 0.0], dtype=torch.float64)
    # All tokens equal: the output is Wx, whatever the score is.
    score = normal(3, 3)
    value = normal(3, 3)
    equal = axis.expand(length, 3)
    step = 0.3 * torch.outer(torch.nn.functional.normalize(normal(3), dim=0), axis / _RADIUS)
    change = (_outputs(equal, score, value + step) - _outputs(equal, score, value)).norm(dim=-1).max()
    bound = attention_lipschitz(_RADIUS, _norm(value), _SCALE).value * _norm(step)
    yield close(f"L = {length}: equal tokens, and the whole of the value's bound", change / bound, 1.0, 1e-9)

    opposite = torch.cat([axis.expand(length // 2, 3), -axis.expand(length // 2, 3)])
    identity = torch.eye(3, dtype=torch.float64)
    small = 1e-6 * identity
    change = (_outputs(opposite, small, identity) - _outputs(opposite, 0 * small, identity)).norm(dim=-1).max()
    bound = attention_lipschitz(_RADIUS, 1.0, _SCALE).score * 1e-6
    yield close(f"L = {length}: opposite tokens, and the whole of the score's bound", change / bound, 1.0, 1e-9)


def _gap(normal: Normal, repetitions: int) -> Iterator[Check]:
    """The largest gap of mean and empirical loss falls as n^{−1/2}, and lies below the bound at every L.

    A head has one number for its score and one for its value; the largest gap is over a grid of them.
    """
    grid = torch.linspace(-1, 1, 4, dtype=torch.float64)
    heads = torch.cartesian_prod(grid, grid)
    sizes = [16, 64, 512]
    mean = _losses(normal, heads, 20_000, 8).mean(-1, keepdim=True)
    gaps = []
    for size in sizes:
        losses = _losses(normal, heads, 5 * repetitions * size, 8).unflatten(-1, (5 * repetitions, size))
        gaps.append((losses.mean(-1) - mean).abs().amax(0))
    yield has_rate("largest gap by the number of sequences", rate(sizes, torch.stack(gaps)), -0.5)
    lipschitz = sum(attention_lipschitz(1.0, 1.0, _SCALE))
    bound = generalisation_bound(2, math.sqrt(2), sizes[-1], lipschitz=lipschitz, loss_range=2.0, loss_lipschitz=2.0)
    # 2ℓε + b√((log of the cover's size + log 2/δ)/2n) with ℓε = b/n, b = ℓ = 2 and δ = 0.05.
    log_size = 2 * math.log(1 + 2 * math.sqrt(2) * lipschitz * sizes[-1])
    formula = 4 / sizes[-1] + 2 * math.sqrt((log_size + math.log(40)) / (2 * sizes[-1]))
    yield close(f"the bound for {sizes[-1]} sequences, and Hoeffding's inequality over a cover", bound, formula)
    # √(P log n/n) to a constant: the cover's logarithm is P log n + O(1), and b/√2 what it comes to.

    def bound_by_rate(n: int) -> float:
        return generalisation_bound(2, math.sqrt(2), n, lipschitz=lipschitz) / math.sqrt(2 * math.log(n) / n)

    ratios = torch.tensor([bound_by_rate(n) for n in (10**3, 10**6, 10**12)])
    yield at_most("10³ to 10¹² sequences: the bound over √(P log n/n)", ratios, math.sqrt(2))
    yield at_least("10³ to 10¹² sequences: the bound over √(P log n/n)", ratios, math.sqrt(0.5))
    yield from _trained(normal, repetitions, 32)
    for length in (8, 128):
        mean = _losses(normal, heads, 5000, length).mean(-1)
        gap = (_losses(normal, heads, sizes[-1], length).mean(-1) - mean).abs().max()
        yield at_most(f"L = {length}: largest gap over {sizes[-1]} sequences and its bound", gap, bound)


def _trained(normal: Normal, repetitions: int, size: int) -> Iterator[Check]:
    """The gap of heads that were trained on their sequences is larger, and still below the bound."""
    population = _sequences(normal, 2000, 8)[None]
    best = _descended(torch.zeros(1, 2, dtype=torch.float64), population)
    samples = _sequences(normal, repetitions * size, 8).unflatten(0, (repetitions, size))
    trained = _descended(best.expand(repetitions, 2), samples)

    def gap(heads: Tensor) -> Tensor:
        """Mean loss less empirical loss, for each sample."""
        mean_loss = _attention_loss(heads, population).mean(-1)
        return mean_loss - _attention_loss(heads.expand(repetitions, 2), samples).mean(-1)

    best_gap = gap(best)
    trained_gap = gap(trained)
    lipschitz = sum(attention_lipschitz(1.0, 1.0, _SCALE))
    bound = generalisation_bound(2, math.sqrt(2), size, lipschitz=lipschitz, loss_range=2.0, loss_lipschitz=2.0)
    name = f"{repetitions} heads trained on {size} sequences: largest gap and its bound"
    yield at_most(name, trained_gap.abs(), bound)
    # Training lowers the empirical loss from that of the best head, and cannot lower the mean loss beyond that head's: it
    # lies above its tangent there, which is level up to what descent has left of the slope.
    best.requires_grad_()
    (slope,) = torch.autograd.grad(_attention_loss(best, population).mean(), best)
    tangent = ((trained - best.detach()) * slope).sum(-1).clamp_max(0)
    yield at_least(
        "trained heads: their gap less that of the best head on the same sequences",
        trained_gap.detach() - best_gap.detach() - tangent,
        -1e-9,
    )
    mean_increase = (trained_gap - best_gap).mean()
    yield at_least("the same, its mean over the heads", mean_increase, 1e-4, f"{mean_increase.item():.4f}")


def _descended(start: Float[Tensor, "R 2"], tokens: Float[Tensor, "R n L+1"]) -> Float[Tensor, "R 2"]:
    """Gradient descent on the mean loss of each head, within [−1, 1]², by steps below what its slope may change."""
    heads = start.clone()
    for _ in range(120):
        heads.requires_grad_()
        (slope,) = torch.autograd.grad(_attention_loss(heads, tokens).mean(-1).sum(), heads)
        heads = (heads - 2.0 * slope).detach().clamp(-1, 1)
    return heads


def _attention_loss(parameters: Float[Tensor, "R 2"], tokens: Float[Tensor, "R n L+1"]) -> Float[Tensor, "R n"]:
    """The loss of `_losses`, by the library's attention: sequences are its heads."""
    observed = tokens[..., :-1, None].expand(len(parameters), -1, -1, -1)
    target = tokens[..., -1]
    score, value = parameters.unsqueeze(1).unbind(-1)
    query = score[..., None, None] * observed[:, :, :1]
    output = ops.attention(query, observed, observed, scale=_SCALE).output[..., 0, 0]
    return 0.5 * (value * output - target).square()


def _sequences(normal: Normal, sequences: int, length: int) -> Float[Tensor, "sequences L+1"]:
    """Tokens in [−1, 1] about a latent of the sequence."""
    return (0.5 * normal(sequences, 1) + 0.5 * normal(sequences, length + 1)).clamp(-1, 1)


def _losses(normal: Normal, parameters: Tensor, sequences: int, length: int) -> Float[Tensor, "heads sequences"]:
    """(w·attention(first token) − next token)²/2 in [0, 2], of each head on each sequence."""
    tokens = _sequences(normal, sequences, length)
    observed = tokens[:, :-1]
    target = tokens[:, -1]
    score, value = parameters.unbind(-1)
    logits = _SCALE * score[:, None, None] * observed[:, :1] * observed
    output = (logits.softmax(-1) * observed).sum(-1)
    return 0.5 * (value[:, None] * output - target).square()


def _outputs(tokens: Tensor, score: Tensor, value: Tensor) -> Float[Tensor, "L d"]:
    """Σ_j p_j W x_j for the first 64 tokens and the last as queries: each is a token like all."""
    query = torch.cat([tokens[:64], tokens[-1:]]) @ score
    values = tokens @ value.T
    return ops.attention(query[None, None], tokens[None, None], values[None, None], scale=_SCALE).output[0, 0]


def _norm(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix, 2).item()
