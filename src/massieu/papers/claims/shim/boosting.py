"""S17: boosting's weights as a measure, its recursion as tilting, its dual problem."""

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.duality import conjugate, natural
from massieu.measures import Atoms, Measure, boosting
from massieu.papers.claims.claim import SHIM, Check, at_least, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim

_EDGE = 1e-14
"""What rounding of α and of a sum over the examples leaves of an edge that is 0: some units of 1e-16."""


@claim(
    "S17",
    title="Boosting weights as measure",
    statement="With the weights e^{−tF} on the points −t g as the measure, A(α) is the log of the exponential loss "
    "after the step α, and boosting's recursion is tilting. AdaBoost's α = ½ log((1 − ε)/ε) makes the edge 0 and "
    "multiplies the loss by 2√(ε(1 − ε)). The least loss is the value of the dual problem.",
    source=f"{SHIM}, §4; formulas beyond the weights are derived",
    status="quoted",
)
def boosting_is_tilting(examples: int = 40, learners: int = 12, rounds: int = 8, seed: int = 0) -> Iterator[Check]:
    # The dual problem has examples less learners unknowns.
    check_at_least(learners + 2, examples=examples)
    normal = normal_draws(seed)
    yield from _adaboost(normal, examples, learners, rounds)
    yield from _totally_corrective(normal, examples, learners)


def _adaboost(normal: Normal, examples: int, learners: int, rounds: int) -> Iterator[Check]:
    """Noisy ±1 learners; the first two examples are the same point with both labels, so that no learner is perfect."""
    labels = torch.sign(normal(examples))
    votes = labels.unsqueeze(-1) * torch.sign(normal(examples, learners) + 0.4)
    labels[:2] = torch.tensor([1.0, -1.0])
    votes[1] = votes[0]
    run = _run_adaboost(labels, votes, rounds)
    zero = torch.zeros(learners, dtype=torch.float64)

    # Each round.
    expected_ratios = torch.tensor(run.expected_ratios, dtype=torch.float64)
    yield close("AdaBoost: edge of the learner under the new weights, and 0", torch.stack(run.edges), 0.0, _EDGE)
    yield close("AdaBoost: ratio of losses and 2√(ε(1 − ε))", torch.stack(run.ratios), expected_ratios)

    # All rounds together: the weights, the loss, and boosting from F as one more measure.
    tilted = run.tilted.expectation(zero, torch.eye(examples, dtype=torch.float64))
    yield close("weights by tilts and by AdaBoost's rule", tilted, run.weights)
    logits = votes @ run.alpha
    loss = torch.exp(-labels * logits)
    log_loss = boosting(labels, torch.zeros_like(labels), votes).log_partition(run.alpha)
    yield close("A(Σ α) and the log of the exponential loss", log_loss, loss.sum().log())
    products = list(itertools.accumulate(run.expected_ratios, operator.mul, initial=1.0))
    yield close("mean exponential loss and the product of the ratios", loss.mean(), products[-1])
    from_logits = boosting(labels, logits, votes)
    eta = 0.1 * normal(5, learners)
    yield close("boosting from F and the tilts: ∇A anywhere", from_logits.mean(eta), run.tilted.mean(eta))
    slack = torch.tensor(products[1:], dtype=torch.float64) - torch.stack(run.training_errors)
    yield at_least("product of the ratios less the training error", slack, -1e-12)


@dataclass(frozen=True)
class _AdaBoostRun:
    """Rounds of AdaBoost.

    Attributes:
        tilted: The measure after all tilts.
        weights: The examples' weights by AdaBoost's own rule.
        alpha: Sum of the steps, shape (learners,).
        edges: Each round's edge of the chosen learner under the new weights.
        ratios: Each round's loss after the step, over the loss before it.
        expected_ratios: 2√(ε(1 − ε)), with ε the weighted error of the chosen learner.
        training_errors: Share of the examples that are wrong after each round.
    """

    tilted: Atoms
    weights: Float[Tensor, "examples"]
    alpha: Float[Tensor, "learners"]
    edges: list[Tensor]
    ratios: list[Tensor]
    expected_ratios: list[float]
    training_errors: list[Tensor]


def _run_adaboost(
    labels: Float[Tensor, "examples"], votes: Float[Tensor, "examples learners"], rounds: int
) -> _AdaBoostRun:
    """In each round the learner whose error is farthest from ½ gets the step α = ½ log((1 − ε)/ε)."""
    zero = torch.zeros_like(votes[0])
    measure: Measure = boosting(labels, torch.zeros_like(labels), votes)
    weights = torch.full_like(labels, 1 / len(labels))
    total_alpha = zero
    edges = []
    ratios = []
    expected_ratios = []
    training_errors = []
    for _ in range(rounds):
        weighted_errors = weights @ (votes != labels.unsqueeze(-1)).double()
        learner = int((0.5 - weighted_errors).abs().argmax())
        error = weighted_errors[learner].item()
        alpha = zero.clone()
        alpha[learner] = 0.5 * math.log((1 - error) / error)
        ratios.append(measure.log_partition(alpha).exp() / measure.log_partition(zero).exp())
        expected_ratios.append(2 * math.sqrt(error * (1 - error)))
        # The step as a tilt of the measure, and by AdaBoost's rule for the weights.
        measure = measure.tilt(alpha)
        weights = weights * torch.exp(-labels * (votes @ alpha))
        weights = weights / weights.sum()
        total_alpha = total_alpha + alpha
        edges.append(measure.mean(zero)[learner])
        training_errors.append((labels * (votes @ total_alpha) <= 0).double().mean())
    assert isinstance(measure, Atoms)
    return _AdaBoostRun(measure, weights, total_alpha, edges, ratios, expected_ratios, training_errors)


def _totally_corrective(normal: Normal, examples: int, learners: int) -> Iterator[Check]:
    """Real-valued learners whose edges are 0 for some positive weights, so that the least loss is attained."""
    labels = torch.sign(normal(examples))
    logits = 0.5 * normal(examples)
    feasible = torch.softmax(0.3 * normal(examples), -1)
    gains = normal(examples, learners) * learners**-0.5
    gains = gains - feasible @ gains
    measure = boosting(labels, logits, -labels.unsqueeze(-1) * gains)
    weights = torch.exp(-labels * logits)
    origin = torch.zeros(learners, dtype=torch.float64)

    # The primal problem: the step α of the least loss makes every edge 0.
    alpha = natural(measure, origin)
    new_weights = weights * torch.exp(gains @ alpha)
    edges = new_weights @ gains / new_weights.sum()
    yield close("least loss: every edge under the new weights, and 0", edges, 0.0)
    other_alphas = alpha + 0.5 * normal(10, learners)
    least_loss = new_weights.sum()
    losses = torch.exp(other_alphas @ gains.T) @ weights
    yield at_least("loss elsewhere less the least loss", losses - least_loss, -1e-12)

    # The dual problem: weights of zero edges that are nearest to w, and its value.
    dual, slope = _least_divergence(weights, gains, feasible * weights.sum())
    divergence = (dual * (dual / weights).log() - dual + weights).sum()
    yield close("dual: slope along weights of zero edges, and 0", slope, 0.0)
    yield close("dual: edges and 0", dual @ gains, 0.0)
    yield close("dual: least Σ p log(p/w) − p + w and Σw − least loss", divergence, weights.sum() - least_loss)
    yield close("dual: its weights and w e^(−tα·g)", dual, new_weights)
    share = dual / dual.sum()
    relative = (share * (share / weights).log()).sum()
    yield close("normalised dual: A*(0) and its least Σ p log(p/w)", conjugate(measure, origin), relative)
    yield close("normalised dual: −A at its least and the same", -measure.log_partition(alpha), relative)


def _least_divergence(
    weights: Float[Tensor, "examples"], gains: Float[Tensor, "examples learners"], start: Float[Tensor, "examples"]
) -> tuple[Float[Tensor, "examples"], Float[Tensor, "unknowns"]]:
    """The p of least Σ p log(p/w) − p + w among those with Σ p g = 0, and the slope that is left there.

    Newton's method from a feasible start on the null space of the constraints, damped so that no weight is more than
    halved.
    """
    orthogonal = torch.linalg.qr(gains, mode="complete")[0]
    # The columns behind those that span the gains, shape (examples, unknowns).
    basis = orthogonal[:, gains.shape[-1] :]
    point = start
    for _ in range(60):
        slope = basis.T @ (point / weights).log()
        step = basis @ torch.linalg.solve((basis.T / point) @ basis, -slope)
        damping = min(1.0, 0.5 / (step / point).abs().max().item())
        point = point + step * damping
    return point, basis.T @ (point / weights).log()
