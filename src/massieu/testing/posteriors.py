"""The laws of posteriors: `posterior_checks`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.posteriors import Posterior
from massieu.testing.checks import Checks, Law
from massieu.testing.everywhere import EVERYWHERE, Subject, checks_with_exemptions, without


@dataclass(frozen=True)
class PosteriorCase:
    """A prior, and sequences of tokens for it.

    Attributes:
        prior: The posterior of no tokens.
        tokens: At least two sequences for each law, of at least three tokens.
        event: How many dimensions one token has; 0 for whole numbers that name a category.
        log_evidence: log p of one sequence (n, *event) under the prior of a batch item, found in another way.
        mean: The posterior mean after it, likewise.
        outcomes: Tokens (m, *event) and log-weights (m) with which the probabilities of a next token sum to one: all
            tokens and zeros, or the points and weights of a quadrature.
        exempt: Laws that the posterior does not promise, by name, each with the reason, such as "order" of a chain.
        compile_backend: Of `torch.compile`, such as "aot_eager" (seconds); None leaves "compiled" out.
    """

    prior: Posterior
    tokens: Shaped[Tensor, "*batch_query_n_event"]
    event: int = 1
    log_evidence: Callable[[Any, Tensor], Any] | None = None
    mean: Callable[[Any, Tensor], Any] | None = None
    outcomes: tuple[Tensor, Tensor] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)
    compile_backend: str | None = None


def posterior_checks(case: PosteriorCase) -> Checks:
    """The laws of what is known of a latent after some tokens, as named checks.

    * evidence, mean: log p(tokens) and the posterior mean against the oracles;
    * chain: the evidence is the sum of the log-predictives; pieces: a context read in pieces is the context;
    * order: tokens in another order say the same; masked: a token that is not seen is not there, whatever it holds, in
      derivatives neither; no token: nothing seen changes nothing;
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
    return checks_with_exemptions(case, _subject, _LAWS)


def _subject(case: PosteriorCase) -> Subject[PosteriorCase]:
    dims, tokens = case.event, case.tokens
    functions = {
        "log_evidence": lambda law, tokens: law.posterior(tokens).log_evidence,
        "mean": lambda law, tokens: law.posterior(tokens).mean,
        "log_predictive": lambda law, tokens: law.posterior(
            tokens.narrow(-dims - 1, 0, tokens.shape[-dims - 1] - 1)
        ).log_predictive(tokens.select(-dims - 1, -1)),
    }
    prior, batch = case.prior.to(torch.float64), len(case.prior.batch_shape)
    tokens = tokens.double() if tokens.is_floating_point() else tokens
    return Subject(case, prior, tokens, functions, 1 + dims, batch)


def _read(subject: Subject[PosteriorCase], tokens: Tensor, mask: Tensor | None = None) -> Any:
    return subject.value.posterior(tokens, mask)


def _same(subject: Subject[PosteriorCase], law: str, actual: Any, expected: Any) -> None:
    """All that two laws hold."""
    for one, other in zip(actual._tensors(), expected._tensors(), strict=True):
        subject.same(law, one, other)


def _cut(subject: Subject[PosteriorCase], *places: int | None) -> Tensor:
    """Some of the tokens of each sequence."""
    return subject.points[(..., slice(*places), *[slice(None)] * subject.case.event)]


def _against(law: str, name: str) -> Callable[[Subject[PosteriorCase]], None]:
    def check(subject: Subject[PosteriorCase]) -> None:
        oracle, tokens, prior = getattr(subject.case, name), subject.points, subject.value
        lead = tokens.shape[: subject.query + 1]
        laws = prior._spread(lead)
        index = torch.cartesian_prod(*[torch.arange(size) for size in lead]).reshape(-1, len(lead))
        expected = []
        for place in map(tuple, index.tolist()):
            one = pytree.tree_map(lambda leaf, place=place: leaf[place] if isinstance(leaf, Tensor) else leaf, laws)
            expected.append(torch.as_tensor(oracle(one, tokens[place]), dtype=torch.float64))
        found = getattr(_read(subject, tokens), name)
        subject.same(f"{law} = oracle", found, torch.stack(expected).reshape(found.shape), 1e-8)

    return check


def _chain(subject: Subject[PosteriorCase]) -> None:
    law, total = subject.value._spread(subject.points.shape[: subject.query + 1]), 0.0
    for token in subject.points.unbind(subject.query + 1):
        total = total + law.log_predictive(token)
        law = law.posterior(token.unsqueeze(subject.query + 1))
    subject.same("chain: log_evidence = Σ log_predictive", law.log_evidence, total)
    _same(subject, "chain: token by token", law, _read(subject, subject.points))


def _pieces(subject: Subject[PosteriorCase]) -> None:
    law = _read(subject, _cut(subject, 2)).posterior(_cut(subject, 2, None))
    _same(subject, "pieces: a longer context updates the shorter", law, _read(subject, subject.points))


def _order(subject: Subject[PosteriorCase]) -> None:
    moved = subject.points.flip(subject.query + 1)
    _same(subject, "order: tokens in another order", _read(subject, moved), _read(subject, subject.points))


def _masked(subject: Subject[PosteriorCase]) -> None:
    tokens, count = subject.points, subject.points.shape[subject.query + 1]
    seen = torch.arange(count, device=tokens.device) != 1
    shown = seen.reshape(-1, *[1] * subject.case.event)
    junk = torch.where(shown, tokens, torch.nan if tokens.is_floating_point() else -7)
    found = _read(subject, junk, seen.expand(tokens.shape[: subject.query + 2]))
    _same(
        subject,
        "masked: a token that is not seen",
        found,
        _read(subject, tokens[(..., seen, *[slice(None)] * subject.case.event)]),
    )
    if tokens.is_floating_point():
        leaf = junk.clone().requires_grad_()
        total = _read(subject, leaf, seen.expand(tokens.shape[: subject.query + 2])).log_evidence.sum()
        (gradient,) = torch.autograd.grad(total, leaf)
        if not bool(gradient.isfinite().all()) or bool((gradient * ~shown).any()):
            raise AssertionError("masked: a token that is not seen has a derivative, or makes another's no number")


def _no_token(subject: Subject[PosteriorCase]) -> None:
    tokens, lead = subject.points, subject.points.shape[: subject.query + 1]
    prior = subject.value._spread(lead)
    _same(subject, "no token: the prior", _read(subject, _cut(subject, 0)), prior)
    if "masked" not in subject.case.exempt:
        nothing = torch.zeros(tokens.shape[: subject.query + 2], dtype=torch.bool, device=tokens.device)
        _same(subject, "no token: all masked", _read(subject, tokens, nothing), prior)


def _predictive(subject: Subject[PosteriorCase]) -> None:
    assert subject.case.outcomes is not None
    tokens, log_weight = subject.case.outcomes
    law, lead = _read(subject, subject.points), subject.points.shape[: subject.query + 1]
    found = (law.log_predictive(tokens.expand(*lead, *tokens.shape)) + log_weight).logsumexp(-1)
    subject.same("predictive: probabilities sum to one", found.exp(), torch.ones_like(found), 1e-7)


def _attention(subject: Subject[PosteriorCase]) -> None:
    found = subject.value.as_attention(subject.points).attend()
    subject.same("attention: its output is the posterior mean", found.output, _read(subject, subject.points).mean)


def _missing_attention(case: PosteriorCase) -> str | None:
    return None if hasattr(case.prior, "as_attention") else "it has no `as_attention`"


def _whole(case: PosteriorCase) -> str | None:
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
    *[law if name != "not a number" else replace(law, missing=_whole) for name, law in EVERYWHERE.items()],
)
