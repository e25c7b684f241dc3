"""The laws of posteriors: `posterior_checks`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.posteriors import Posterior
from massieu.testing.checks import Checks, Law, check_case
from massieu.testing.everywhere import EVERYWHERE, SuiteCase, Trial, checks_with_exemptions, without


@dataclass(frozen=True, eq=False)
class PosteriorCase(SuiteCase):
    """A prior, and sequences of tokens for it.

    Attributes:
        prior: The posterior of no tokens.
        tokens: At least two sequences for each law, of at least three tokens.
        event: Number of dimensions of one token; 0 for whole numbers that name a category.
        log_evidence: Oracle: log p of one sequence (n, *event) under the prior of a batch item.
        mean: Oracle: the posterior mean after that sequence.
        outcomes: Tokens (m, *event) and log-weights (m) with which the probabilities of a next token sum to one: all
            tokens and zeros, or the points and weights of a quadrature.
        exempt, compile_backend: Laws that are not promised, each with the reason, such as "order" for a chain; the backend
            of "compiled".

    Example:
        >>> import torch
        >>> from massieu.posteriors import DirichletMultinomial
        >>> from massieu.testing import PosteriorCase, posterior_checks
        >>> outcomes = torch.arange(2), torch.zeros(2)
        >>> case = PosteriorCase(DirichletMultinomial.create([1.0, 2.0]), torch.eye(3).long(), 0, outcomes=outcomes)
        >>> posterior_checks(case)["predictive"]()
    """

    prior: Posterior
    tokens: Shaped[Tensor, "*batch_query_n_event"]
    event: int = 1
    log_evidence: Callable[[Any, Tensor], Any] | None = None
    mean: Callable[[Any, Tensor], Any] | None = None
    outcomes: tuple[Tensor, Tensor] | None = None


def posterior_checks(case: PosteriorCase) -> Checks:
    """Named checks of a posterior of a latent given tokens.

    * evidence, mean: log p(tokens) and the posterior mean against the oracles;
    * chain: the evidence is the sum of the log-predictives; pieces: a context read in two pieces gives the same posterior;
    * order: so do tokens in another order; masked: so does leaving a masked token out, whatever it holds, in derivatives
      too; no token: without a token the posterior is the prior;
    * predictive: the probabilities of all next tokens sum to one; attention: `as_attention` gives the posterior mean;
    * and structure, one by one, vmap, derivatives, precision, half precision, no query, meta, not a number, compiled,
      where one query is a sequence.

    Example:
        >>> import torch
        >>> from massieu.posteriors import GaussianMean
        >>> from massieu.testing import PosteriorCase, posterior_checks
        >>> case = PosteriorCase(GaussianMean.create(torch.zeros(2), 1.0, 1.0), torch.eye(2).repeat(3, 2, 1))
        >>> for name, check in posterior_checks(case):
        ...     check()
    """
    check_case(case, PosteriorCase, Posterior)
    return checks_with_exemptions(case, _trial, _LAWS)


def _trial(case: PosteriorCase) -> Trial[PosteriorCase]:
    dims = case.event
    tokens = case.tokens
    functions = {
        "log_evidence": lambda law, tokens: law.posterior(tokens).log_evidence,
        "mean": lambda law, tokens: law.posterior(tokens).mean,
        "log_predictive": lambda law, tokens: law.posterior(
            tokens.narrow(-dims - 1, 0, tokens.shape[-dims - 1] - 1)
        ).log_predictive(tokens.select(-dims - 1, -1)),
    }
    prior = case.prior.to(torch.float64)
    batch = len(case.prior.batch_shape)
    tokens = tokens.double() if tokens.is_floating_point() else tokens
    return Trial(case, prior, tokens, functions, 1 + dims, batch)


def _read(trial: Trial[PosteriorCase], tokens: Tensor, mask: Tensor | None = None) -> Any:
    return trial.value.posterior(tokens, mask)


def _same(trial: Trial[PosteriorCase], law: str, actual: Any, expected: Any) -> None:
    """All tensors of two laws agree."""
    for one, other in zip(actual._tensors(), expected._tensors(), strict=True):
        trial.same(law, one, other)


def _cut(trial: Trial[PosteriorCase], *places: int | None) -> Tensor:
    """A slice of the tokens of each sequence."""
    return trial.points[(..., slice(*places), *[slice(None)] * trial.case.event)]


def _against(law: str, name: str) -> Callable[[Trial[PosteriorCase]], None]:
    def check(trial: Trial[PosteriorCase]) -> None:
        oracle = getattr(trial.case, name)
        tokens = trial.points
        prior = trial.value
        lead = tokens.shape[: trial.query + 1]
        laws = prior._spread(lead)
        index = torch.cartesian_prod(*[torch.arange(size) for size in lead]).reshape(-1, len(lead))
        expected = []
        for place in map(tuple, index.tolist()):
            one = pytree.tree_map(lambda leaf, place=place: leaf[place] if isinstance(leaf, Tensor) else leaf, laws)
            expected.append(torch.as_tensor(oracle(one, tokens[place]), dtype=torch.float64))
        actual = getattr(_read(trial, tokens), name)
        trial.same(f"{law} = oracle", actual, torch.stack(expected).reshape(actual.shape), 1e-8)

    return check


def _chain(trial: Trial[PosteriorCase]) -> None:
    law = trial.value._spread(trial.points.shape[: trial.query + 1])
    total = 0.0
    for token in trial.points.unbind(trial.query + 1):
        total = total + law.log_predictive(token)
        law = law.posterior(token.unsqueeze(trial.query + 1))
    trial.same("chain: log_evidence = Σ log_predictive", law.log_evidence, total)
    _same(trial, "chain: token by token", law, _read(trial, trial.points))


def _pieces(trial: Trial[PosteriorCase]) -> None:
    law = _read(trial, _cut(trial, 2)).posterior(_cut(trial, 2, None))
    _same(trial, "pieces: a longer context updates the shorter", law, _read(trial, trial.points))


def _order(trial: Trial[PosteriorCase]) -> None:
    moved = trial.points.flip(trial.query + 1)
    _same(trial, "order: tokens in another order", _read(trial, moved), _read(trial, trial.points))


def _masked(trial: Trial[PosteriorCase]) -> None:
    tokens = trial.points
    count = trial.points.shape[trial.query + 1]
    seen = torch.arange(count, device=tokens.device) != 1
    shown = seen.reshape(-1, *[1] * trial.case.event)
    junk = torch.where(shown, tokens, torch.nan if tokens.is_floating_point() else -7)
    masked = _read(trial, junk, seen.expand(tokens.shape[: trial.query + 2]))
    without_token = _read(trial, tokens[(..., seen, *[slice(None)] * trial.case.event)])
    _same(trial, "masked: a token that is not seen", masked, without_token)
    if tokens.is_floating_point():
        leaf = junk.clone().requires_grad_()
        total = _read(trial, leaf, seen.expand(tokens.shape[: trial.query + 2])).log_evidence.sum()
        (gradient,) = torch.autograd.grad(total, leaf)
        if not bool(gradient.isfinite().all()) or bool((gradient * ~shown).any()):
            raise AssertionError("masked: a token that is not seen has a derivative, or makes another's no number")


def _no_token(trial: Trial[PosteriorCase]) -> None:
    tokens = trial.points
    lead = trial.points.shape[: trial.query + 1]
    prior = trial.value._spread(lead)
    _same(trial, "no token: the prior", _read(trial, _cut(trial, 0)), prior)
    if "masked" not in trial.case.exempt:
        nothing = torch.zeros(tokens.shape[: trial.query + 2], dtype=torch.bool, device=tokens.device)
        _same(trial, "no token: all masked", _read(trial, tokens, nothing), prior)


def _predictive(trial: Trial[PosteriorCase]) -> None:
    assert trial.case.outcomes is not None
    tokens, log_weight = trial.case.outcomes
    law = _read(trial, trial.points)
    lead = trial.points.shape[: trial.query + 1]
    log_total = (law.log_predictive(tokens.expand(*lead, *tokens.shape)) + log_weight).logsumexp(-1)
    trial.same("predictive: probabilities sum to one", log_total.exp(), torch.ones_like(log_total), 1e-7)


def _attention(trial: Trial[PosteriorCase]) -> None:
    attention = trial.value.as_attention(trial.points).attend()
    trial.same("attention: its output is the posterior mean", attention.output, _read(trial, trial.points).mean)


def _missing_attention(case: PosteriorCase) -> str | None:
    return None if hasattr(case.prior, "as_attention") else "it has no `as_attention`"


def _missing_floats(case: PosteriorCase) -> str | None:
    return None if case.tokens.is_floating_point() else "tokens are whole numbers"


_LAWS: tuple[Law[Any, Any], ...] = (
    Law("evidence", _against("evidence", "log_evidence"), without("log_evidence")),
    Law("mean", _against("mean", "mean"), without("mean")),
    Law("chain", _chain),
    Law("pieces", _pieces),
    Law("order", _order),
    Law("masked", _masked),
    Law("no token", _no_token),
    Law("predictive", _predictive, without("outcomes")),
    Law("attention", _attention, _missing_attention),
    *[law if name != "not a number" else replace(law, missing=_missing_floats) for name, law in EVERYWHERE.items()],
)
