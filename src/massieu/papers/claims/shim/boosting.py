"""S17: boosting's weights as a measure, its recursion as tilting, its dual problem."""

import math
from collections.abc import Iterator

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
    zero = torch.zeros(learners, dtype=torch.float64)
    start = boosting(labels, torch.zeros_like(labels), votes)
    measure: Measure = start
    weights = torch.full_like(labels, 1 / examples)
    step = zero
    edges = []
    ratios = []
    expected = []
    product = [1.0]
    errors = []
    for _ in range(rounds):
        wrong = weights @ (votes != labels.unsqueeze(-1)).double()
        chosen = int((0.5 - wrong).abs().argmax())
        error = wrong[chosen].item()
        alpha = zero.clone()
        alpha[chosen] = 0.5 * math.log((1 - error) / error)
        ratios.append(measure.log_partition(alpha).exp() / measure.log_partition(zero).exp())
        measure = measure.tilt(alpha)
        step = step + alpha
        weights = weights * torch.exp(-labels * (votes @ alpha))
        weights = weights / weights.sum()
        edges.append(measure.mean(zero)[chosen])
        expected.append(2 * math.sqrt(error * (1 - error)))
        product.append(product[-1] * expected[-1])
        errors.append((labels * (votes @ step) <= 0).double().mean())
    yield close("AdaBoost: edge of the learner under the new weights, and 0", torch.stack(edges), 0.0, _EDGE)
    yield close(
        "AdaBoost: ratio of losses and 2√(ε(1 − ε))", torch.stack(ratios), torch.tensor(expected, dtype=torch.float64)
    )
    assert isinstance(measure, Atoms)
    tilted = measure.expectation(zero, torch.eye(examples, dtype=torch.float64))
    yield close("weights by tilts and by AdaBoost's rule", tilted, weights)
    loss = torch.exp(-labels * (votes @ step))
    yield close("A(Σ α) and the log of the exponential loss", start.log_partition(step), loss.sum().log())
    yield close("mean exponential loss and the product of the ratios", loss.mean(), product[-1])
    again = boosting(labels, votes @ step, votes)
    probe = 0.1 * normal(5, learners)
    yield close("boosting from F and the tilts: ∇A anywhere", again.mean(probe), measure.mean(probe))
    slack = torch.tensor(product[1:], dtype=torch.float64) - torch.stack(errors)
    yield at_least("product of the ratios less the training error", slack, -1e-12)


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
    alpha = natural(measure, origin)
    scaled = weights * torch.exp(gains @ alpha)
    edges = scaled @ gains / scaled.sum()
    yield close("least loss: every edge under the new weights, and 0", edges, 0.0)
    others = alpha + 0.5 * normal(10, learners)
    least = scaled.sum()
    losses = torch.exp(others @ gains.T) @ weights
    yield at_least("loss elsewhere less the least loss", losses - least, -1e-12)

    dual, slope = _least_divergence(weights, gains, feasible * weights.sum())
    divergence = (dual * (dual / weights).log() - dual + weights).sum()
    yield close("dual: slope along weights of zero edges, and 0", slope, 0.0)
    yield close("dual: edges and 0", dual @ gains, 0.0)
    yield close("dual: least Σ p log(p/w) − p + w and Σw − least loss", divergence, weights.sum() - least)
    yield close("dual: its weights and w e^(−tα·g)", dual, scaled)
    share = dual / dual.sum()
    relative = (share * (share / weights).log()).sum()
    yield close("normalised dual: A*(0) and its least Σ p log(p/w)", conjugate(measure, origin), relative)
    yield close("normalised dual: −A at its least and the same", -measure.log_partition(alpha), relative)


def _least_divergence(
    weights: Float[Tensor, "examples"], gains: Float[Tensor, "examples learners"], start: Float[Tensor, "examples"]
) -> tuple[Float[Tensor, "examples"], Float[Tensor, "unknowns"]]:
    """The p of least Σ p log(p/w) − p + w among those with Σ p g = 0, from one of them; and the slope that is left.

    Newton's method on the null space of the constraints, damped so that no weight is more than halved.
    """
    basis = torch.linalg.qr(gains, mode="complete")[0][:, gains.shape[-1] :]
    point = start
    for _ in range(60):
        slope = basis.T @ (point / weights).log()
        step = basis @ torch.linalg.solve((basis.T / point) @ basis, -slope)
        point = point + step * min(1.0, 0.5 / (step / point).abs().max().item())
    return point, basis.T @ (point / weights).log()
