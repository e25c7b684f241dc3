"""What is sufficient for a concept, and the regret of averaging models (Z2, Z11)."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import (
    check_log_probabilities,
    check_one_device,
    check_shape,
    check_values,
    doubles,
    real_tensor,
    whole_number,
)
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.values import promoted_dtype

_MOST_SEQUENCES = 1_000_000
_MOST_COUNTS = 2048
_SAME_LAW = 1e-9
"""Laws whose entries differ by at most this are one law: computed from different counts, they differ by rounding."""


class SufficiencyResult(NamedTuple):
    """Information of sequences of tokens, and of their posteriors, about a concept, in nats."""

    information: float
    """I(z; X), X the sequence."""
    posterior_information: float
    """I(z; S), S = P(z | X): the same, since the posterior is sufficient."""
    sequences: int
    posteriors: int
    """Number of different posteriors."""
    least_loss: float
    """What I(z; ·) loses by the cheapest merger of two different posteriors: positive, since the posterior is minimal."""
    least_label_loss: float
    """The same of I(y; ·) for the given label: it may be 0, since the posterior is not minimal for one label (trap 23)."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door
def sufficiency(
    log_prior: Float[Tensor, "K"],
    log_likelihood: Float[Tensor, "K V"],
    length: int,
    *,
    label: Float[Tensor, "K Y"] | None = None,
) -> SufficiencyResult:
    """Enumerate all V^length sequences of tokens independent given one of K concepts (Z2).

    Args:
        log_prior: log-weights of the concepts, normalised here.
        log_likelihood: log-weights of the tokens, normalised here; −inf for a token that a concept never emits.
        length: Number of tokens of a sequence.
        label: P(y | z), one row for each concept; by default y = z.

    Raises:
        ValueError: shapes that do not fit, NaN or +inf, a label whose rows are no probabilities, more than a million
            sequences or 2048 that differ in their tokens' counts, one posterior alone (nothing to merge).
        TypeError: not tensors, a length that is no whole number.

    Example:
        >>> import torch
        >>> from massieu.posteriors import sufficiency
        >>> bent = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> result = sufficiency(torch.zeros(2), bent, length=3)
        >>> result.sequences, result.posteriors, round(result.information - result.posterior_information, 6)
        (8, 4, 0.0)
    """
    log_prior = _weights("log_prior", log_prior)
    log_likelihood = _weights("log_likelihood", log_likelihood)
    check_shape("log_prior", log_prior, ("K",))
    concepts = len(log_prior)
    check_shape("log_likelihood", log_likelihood, (concepts, "V"))
    tokens = log_likelihood.shape[1]
    # By logarithms: the power itself may be as long as memory.
    whole_number("length", length)
    if length < 1 or tokens < 1 or length * math.log(tokens) > math.log(_MOST_SEQUENCES) + 1e-9:
        raise ValueError(f"{tokens} tokens and length {length}: needed are 1 to {_MOST_SEQUENCES} sequences")
    counts = math.comb(tokens + length - 1, length)
    if counts > _MOST_COUNTS:
        raise ValueError(
            f"{tokens} tokens and length {length}: sequences have {counts} different counts of tokens, more than the "
            f"{_MOST_COUNTS} that are compared with each other"
        )
    if label is None:
        label = torch.eye(concepts, dtype=torch.float64)
    else:
        label = doubles("label", label)
    check_values(label=label)
    check_shape("label", label, (concepts, "Y"))
    label = label.cpu()
    if not bool((label >= 0).all()) or not bool(((label.sum(-1) - 1).abs() < 1e-6).all()):
        raise ValueError("label must have rows of probabilities: entries at least 0, of sum 1")
    prior = torch.log_softmax(log_prior.cpu(), 0)
    likelihood = torch.log_softmax(log_likelihood.cpu(), 1)
    sequences = torch.cartesian_prod(*[torch.arange(tokens)] * length).reshape(-1, length)
    # P(sequence, concept), (S, K), of the sequences that some concept emits.
    joint = (prior + likelihood[:, sequences].sum(-1).T).exp()
    possible = joint.sum(-1) > 0
    joint = joint[possible]
    sequences = sequences[possible]
    kind = _posteriors(joint, sequences, tokens)
    merged = torch.zeros(int(kind.max()) + 1, concepts, dtype=torch.float64).index_add_(0, kind, joint)
    if len(merged) < 2:
        raise ValueError("log_prior and log_likelihood give all sequences one posterior: there is nothing to merge")
    return SufficiencyResult(
        information=_information(joint),
        posterior_information=_information(merged),
        sequences=len(joint),
        posteriors=len(merged),
        least_loss=float(_merger_losses(merged).min()),
        least_label_loss=float(_merger_losses(merged @ label).min()),
    )


def _weights(name: str, value: Any) -> Tensor:
    """Log-weights in float64; or an error unless they can be read and are below +inf."""
    tensor = doubles(name, value)
    check_values(**{name: tensor})
    check_log_probabilities(**{name: tensor})
    return tensor


def _posteriors(joint: Tensor, sequences: Int[Tensor, "S L"], tokens: int) -> Int[Tensor, "S"]:
    """The number of each sequence's posterior. Sequences with equal counts share one, whatever its rounding."""
    counts = torch.nn.functional.one_hot(sequences, tokens).sum(1)
    _, kind = torch.unique(counts, dim=0, return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), len(kind)).scatter_reduce(0, kind, torch.arange(len(kind)), "amin")
    laws = joint[first] / joint[first].sum(-1, keepdim=True)
    same = torch.cdist(laws, laws, p=torch.inf) <= _SAME_LAW
    _, number = torch.unique(same.int().argmax(-1), return_inverse=True)
    return number[kind]


def _information(joint: Float[Tensor, "S K"]) -> float:
    """Mutual information of row and column, Σ P log(P/PP)."""
    independent = joint.sum(-1, keepdim=True) * joint.sum(0)
    return float((torch.special.xlogy(joint, joint) - torch.special.xlogy(joint, independent)).sum())


def _merger_losses(joint: Float[Tensor, "S K"]) -> Float[Tensor, "pairs"]:
    """The loss of I(row; column) by each merger of two rows: their Jensen–Shannon divergence, with the rows' weights."""
    left, right = torch.combinations(torch.arange(len(joint))).unbind(-1)

    def concentration(rows: Tensor) -> Tensor:
        return torch.special.xlogy(rows, rows / rows.sum(-1, keepdim=True)).sum(-1)

    by_row = concentration(joint)
    return by_row[left] + by_row[right] - concentration(joint[left] + joint[right])


# --- regret (Z11) ------------------------------------------------------------------------------------------------------


class RegretResult(NamedTuple):
    """Cumulative losses after each of t tokens, in nats."""

    loss: Float[Tensor, "*batch t"]
    """−Σ_{i ≤ t} log p(token i | tokens before), of the predictor."""
    best: Float[Tensor, "*batch t"]
    """min_z −Σ log p(token i | z), of the best concept in hindsight."""
    bound: Float[Tensor, "*batch t"]
    """min_z [−Σ log p(token i | z) + log 1/π(z)]: an exact average of all concepts never loses more."""

    __repr__ = fields_repr
    _repr_html_ = fields_html

    @property
    def average(self) -> Float[Tensor, "*batch t"]:
        """(loss − best)/t; at most log|𝒵|/t for the exact average under a uniform prior."""
        steps = torch.arange(1, self.loss.shape[-1] + 1, dtype=self.loss.dtype, device=self.loss.device)
        return (self.loss - self.best) / steps


def averaging_regret(
    log_predictive: Float[Tensor, "*batch t"],
    log_likelihoods: Float[Tensor, "*batch t K"],
    log_prior: Float[Tensor, "K"],
) -> RegretResult:
    """Regret of a predictor against the best concept, and the bound that Bayesian model averaging keeps (Z11).

    Args:
        log_predictive: log p(token i | tokens before) of any predictor, such as a trained model.
        log_likelihoods: log p(token i | z) for each concept.
        log_prior: log-weights of the concepts, normalised here.

    Raises:
        ValueError: shapes that do not fit, NaN, +inf.
        TypeError: not tensors.

    Example:
        >>> import torch
        >>> from massieu.posteriors import averaging_regret
        >>> of_concepts = torch.tensor([[0.5, 0.9], [0.5, 0.9]]).log()
        >>> regret = averaging_regret(of_concepts[:, 0], of_concepts, torch.zeros(2))
        >>> [round(x, 3) for x in (regret.loss - regret.best).tolist()]
        [0.588, 1.176]
    """
    log_predictive = real_tensor("log_predictive", log_predictive)
    log_likelihoods = real_tensor("log_likelihoods", log_likelihoods)
    log_prior = real_tensor("log_prior", log_prior)
    check_shape("log_likelihoods", log_likelihoods, (*log_predictive.shape, "K"))
    check_shape("log_prior", log_prior, log_likelihoods.shape[-1:])
    check_one_device(log_predictive=log_predictive, log_likelihoods=log_likelihoods, log_prior=log_prior)
    check_log_probabilities(log_predictive=log_predictive, log_likelihoods=log_likelihoods, log_prior=log_prior)
    dtype = promoted_dtype(log_predictive, log_likelihoods)
    loss = -log_predictive.to(dtype).cumsum(-1)
    concept_losses = -log_likelihoods.to(dtype).cumsum(-2)
    prior = torch.log_softmax(log_prior.to(dtype), -1)
    return RegretResult(loss, concept_losses.amin(-1), (concept_losses - prior).amin(-1))
