"""Every backend of attention and of its moments against explicit matrices in float64, for `benchmarks/on_cuda.py`.

Errors are relative: of output, log Z and gradients in the norm of all numbers, of a moment the largest beside the largest. Bars
are what roundings explain: of float32 in sums, and of the dtype in results, weights and gradients.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from massieu import ops

BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 4, 2, 200, 64
DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("fused", "cudnn", "flash", "efficient", "flex", "blocks", "reference")
MOMENT_BACKENDS = ("triton", "blocks", "reference")
COMPILED = {
    "flex": {("soft cap", dtype) for dtype in DTYPES} | {("weights of pairs", "bfloat16")},
    "triton": {
        (kind, dtype) for kind in ("causal", "mask of keys", "window", "documents", "soft cap") for dtype in DTYPES
    },
}
"""What is tried of those that compile for seconds."""
SINGLE = torch.finfo(torch.float32).eps

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """One attention on the CPU: tensors with a gradient, among them log-weights and sinks, and other options."""

    tensors: Tensors
    options: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None
    """Which pairs are hidden by what the options say."""


def problems(dtype: str) -> dict[str, Problem]:
    """By kind, in the dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    kept = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) < 0.8
    kept[0, :, :3] = False
    kept_keys = kept[:, :, 5:6].clone()
    place = torch.arange(LENGTH)
    ahead = place - place[:, None]
    boundaries = LENGTH // 2, LENGTH // 2 + 1
    document = torch.bucketize(place, torch.tensor(boundaries), right=True)
    documents = ops.Documents.of_lengths((boundaries[0], 1, LENGTH - boundaries[1]))
    given = getattr(torch, dtype)
    shared = {
        name: draw(BATCH, heads, LENGTH, SIZE).to(given)
        for name, heads in (("query", HEADS), ("key", KEY_HEADS), ("value", KEY_HEADS))
    }
    later = ahead > 0
    weights = {"keys": draw(BATCH, 1, 1, LENGTH), "pairs": draw(HEADS, LENGTH, LENGTH)}
    return {
        "plain": Problem(shared),
        "causal": Problem(shared, {"is_causal": True}, later),
        "mask of keys": Problem(shared, {"log_weight": kept_keys, "is_causal": True}, later),
        "mask of pairs": Problem(shared, {"log_weight": kept}),
        "weights of keys": Problem(shared | {"log_weight": weights["keys"]}),
        "weights of pairs": Problem(shared | {"log_weight": weights["pairs"]}),
        "window": Problem(shared, {"window": (30, 4)}, (ahead < -30) | (ahead > 4)),
        "documents": Problem(
            shared, {"documents": documents, "is_causal": True}, later | (document != document[:, None])
        ),
        "soft cap": Problem(shared, {"softcap": 2.0}),
        "sink": Problem(shared | {"sink": draw(HEADS)}, {"is_causal": True}, later),
    }


# --- explicit --------------------------------------------------------------------------------------------------------


def _scores(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Scores ``(B, H, L, N)`` and log-weights."""
    query, key, weight = tensors["query"], tensors["key"], tensors.get("log_weight")
    scores = query @ key.repeat_interleave(HEADS // KEY_HEADS, 1).mT * SIZE**-0.5
    if cap := problem.options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    weight = torch.zeros_like(scores) if weight is None else weight.expand_as(scores)
    mask = problem.options.get("log_weight")
    if mask is not None:
        weight = weight.masked_fill(~mask, -torch.inf)
    return scores, weight if problem.hidden is None else weight.masked_fill(problem.hidden, -torch.inf)


def _finite(numbers: Tensor) -> Tensor:
    return numbers.masked_fill(numbers == -torch.inf, 0.0)


def explicit(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Output and log Z; of queries that see no key 0 and −∞."""
    scores, weight = _scores(problem, tensors)
    none = (weight == -torch.inf).all(-1, keepdim=True)
    weight = weight.masked_fill(none, 0.0)
    level = torch.logsumexp(scores + weight, -1)
    if "sink" in tensors:
        level = torch.logaddexp(level, tensors["sink"][:, None])
    p = (scores + weight - level[..., None]).exp().masked_fill(none, 0.0)
    output = p @ tensors["value"].repeat_interleave(HEADS // KEY_HEADS, 1)
    return output, level.masked_fill(none.squeeze(-1), -torch.inf)


def explicit_moments(problem: Problem, tensors: Tensors) -> Tensors:
    """By name, of a problem without a sink."""
    scores, weight = _scores(problem, tensors)
    level, prior = torch.logsumexp(scores + weight, -1), torch.logsumexp(weight, -1)
    seen = weight != -torch.inf
    p, h = ((part - _finite(total)[..., None]).exp() for part, total in ((scores + weight, level), (weight, prior)))
    mean, prior_mean = (p * scores).sum(-1), (h * scores).sum(-1)
    return {
        "log_partition": level,
        "entropy": -torch.xlogy(p, p).sum(-1),
        "mean_score": mean,
        "score_variance": (p * (scores - mean[..., None]).square()).sum(-1),
        "max_weight": p.amax(-1),
        "collision": p.square().sum(-1),
        "prior_log_partition": prior,
        "prior_mean_score": prior_mean,
        "prior_score_variance": (h * (scores - prior_mean[..., None]).square()).sum(-1),
        "max_score": scores.masked_fill(~seen, -torch.inf).amax(-1),
    }


# --- compared --------------------------------------------------------------------------------------------------------


def _on(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in given.items()}


def _norm(found: Tensor, exact: Tensor) -> float:
    """Relative error; infinite where other numbers are infinite or NaN."""
    found, exact = found.detach().double().cpu(), exact.detach()
    if not torch.equal(found.isfinite(), exact.isfinite()):
        return float("inf")
    found, exact = _finite(found), _finite(exact)
    return float((found - exact).norm() / exact.norm())


def _largest(found: Tensor, exact: Tensor) -> float:
    """The largest error beside the largest number."""
    found, exact = found.double().cpu(), exact
    if not torch.equal(found.isfinite(), exact.isfinite()):
        return float("inf")
    found, exact = _finite(found), _finite(exact)
    return float((found - exact).abs().amax() / exact.abs().amax())


def _with_gradients(results: Sequence[Tensor], leaves: Tensors, cotangents: Sequence[Tensor], trained: bool) -> Tensors:
    found = dict(zip(("output", "log_partition"), results, strict=True))
    if not trained:
        return found
    level = results[1]
    given = [cotangents[0].to(results[0]), torch.where(level == -torch.inf, 0.0, cotangents[1].to(level))]
    slopes = torch.autograd.grad(results, list(leaves.values()), given)
    return found | {f"grad_{name}": slope for name, slope in zip(leaves, slopes, strict=True)}


def cotangents(problem: Problem) -> list[Tensor]:
    """Of output and log Z."""
    generator = torch.Generator().manual_seed(1)
    shapes = (BATCH, HEADS, LENGTH, SIZE), (BATCH, HEADS, LENGTH)
    output, level = (torch.randn(shape, generator=generator) for shape in shapes)
    return [output.to(problem.tensors["query"].dtype), level]


def leaves(problem: Problem, dtype: torch.dtype | None, device: torch.device, trained: bool) -> Tensors:
    """The problem's tensors there, in float64 or as they are."""
    return {
        name: one.to(device, dtype or one.dtype, copy=True).requires_grad_(trained)
        for name, one in problem.tensors.items()
    }


def exact_attention(problem: Problem) -> Tensors:
    """Results and gradients, by part."""
    wide = leaves(problem, torch.float64, torch.device("cpu"), trained=True)
    return _with_gradients(explicit(problem, wide), wide, cotangents(problem), trained=True)


def attention_errors(problem: Problem, exact: Tensors, backend: str, device: torch.device) -> dict[str, float]:
    """By part: output, log Z, and the gradients where the backend has some.

    Raises:
        ValueError: the backend refuses.
    """
    trained = backend != "blocks"
    given = leaves(problem, None, device, trained)
    results = ops.attention(**given, **_on(device, problem.options), backend=backend)  # pyright: ignore
    slopes = [one.to(device) for one in cotangents(problem)]
    found = _with_gradients(results, given, slopes, trained)
    return {part: _norm(one, exact[part]) for part, one in found.items()}


def exact_moments(problem: Problem) -> Tensors:
    """By name, and the output."""
    wide = leaves(problem, torch.float64, torch.device("cpu"), trained=False)
    return explicit_moments(problem, wide) | {"output": explicit(problem, wide)[0]}


def moment_errors(problem: Problem, exact: Tensors, backend: str, device: torch.device) -> dict[str, float]:
    """By moment, and of the output.

    Raises:
        ValueError: the backend refuses.
    """
    given = _on(device, problem.tensors | problem.options)
    result = ops.attention_moments(**given, backend=backend)  # pyright: ignore[reportArgumentType]
    return {name: (_norm if name == "output" else _largest)(getattr(result, name), one) for name, one in exact.items()}


def bar(part: str, dtype: str) -> float:
    """What rounding explains of an error."""
    rounding = torch.finfo(getattr(torch, dtype)).eps
    if part == "output":
        return 16 * SINGLE + 4 * rounding
    if part.startswith("grad"):
        return 32 * SINGLE + 8 * rounding
    return 16 * SINGLE + 0.1 * rounding if part == "log_partition" else 64 * SINGLE


def tried(kind: str, dtype: str) -> Iterator[tuple[str, str]]:
    """Functions and backends."""
    backends = {"attention": BACKENDS, "moments": () if kind == "sink" else MOMENT_BACKENDS}
    for function, names in backends.items():
        for backend in names:
            if (kind, dtype) in COMPILED.get(backend, {(kind, dtype)}):
                yield function, backend


def accuracy(device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each function, backend, dtype and kind, where the backend does not refuse."""
    for dtype in DTYPES:
        for kind, problem in problems(dtype).items():
            exact = {"attention": exact_attention(problem), "moments": exact_moments(problem)}
            for function, backend in tried(kind, dtype):
                errors_of = attention_errors if function == "attention" else moment_errors
                try:
                    errors = errors_of(problem, exact[function], backend, device)
                except ValueError as error:
                    if "cannot be used here" not in str(error):
                        raise
                    continue
                except RuntimeError as error:  # a kernel that fails is wrong, and the others are still looked at
                    print(f"{function} by {backend}, {dtype}, {kind}: {error}", flush=True)
                    errors = {type(error).__name__: math.inf}
                share = max(error / bar(part, dtype) for part, error in errors.items())
                row = {"function": function, "backend": backend, "dtype": dtype, "kind": kind, "errors": errors}
                yield row | {"of_bar": share, "met": share <= 1}
