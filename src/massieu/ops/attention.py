"""Attention that also returns its log-partition, and the log-partition alone."""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.guesses import meant
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import in_autocast_dtype
from massieu.ops import backends, band, direct, packed_rows, reference, tiles
from massieu.ops import sink as with_sink
from massieu.ops.cuda.cudnn import CUDNN
from massieu.ops.cuda.efficient import EFFICIENT
from massieu.ops.cuda.flash import FLASH
from massieu.ops.cuda.flex import FLEX
from massieu.ops.cuda.packed_flash import PACKED_FLASH
from massieu.ops.documents import Documents
from massieu.ops.fused import CPU
from massieu.ops.observed import observed
from massieu.ops.shapes import AttentionProblem, Scale, Sink, Window, check_problem

_NO_DROPOUT = (
    "not an argument here, as kernels that return log Z keep no weights to drop: `massieu.nn.Attention(dropout=…)` drops them "
    "in training, or drop exp(scores − log Z), from `ops.log_partition`, before the values"
)
AttentionBackend = Literal["auto", "fused", "cudnn", "flash", "efficient", "flex", "blocks", "reference"]

BACKENDS: tuple[backends.Backend, ...] = (
    CPU,
    CUDNN,
    FLASH,
    EFFICIENT,
    FLEX,
    tiles.Blocks(tiles.attention),
    reference.Reference(reference.attention),
)
"""In order of preference."""


class AttentionResult(NamedTuple):
    """What `attention` returns: values averaged under the attention weights, and the logarithm of their normaliser."""

    output: Float[Tensor, "*query E"]
    """Σ_n p_n value_n, in the query's dtype; 0 where no key is visible."""
    log_partition: Float[Tensor, "*query"]
    """log Z in nats, float32 or float64; −inf where no key is visible (and there is no sink)."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@meant(
    attn_mask="`log_weight` here: numbers are added to the scores, and of booleans True keeps a key",
    mask="`log_weight` here: numbers are added to the scores, and of booleans True keeps a key",
    dropout_p=_NO_DROPOUT,
    dropout=_NO_DROPOUT,
    enable_gqa="not needed here: keys may have fewer heads than queries",
)
def attention(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    sink: Sink = None,
    sink_value: Float[Tensor, "... E"] | None = None,
    backend: AttentionBackend = "auto",
) -> AttentionResult:
    """Softmax attention and its log-partition, differentiable in both, in memory linear in queries and keys.

    With scores s_n = scale·query·key_n and weights w_n = exp(log_weight_n): log Z = log Σ w_n exp(s_n), p_n = w_n
    exp(s_n)/Z, output Σ p_n value_n (S3: the mean of atoms, and its log-partition).

    Args:
        query: (*batch, H, L, D) with H a multiple of the key's Hk heads, query head h on key head h // (H / Hk); or, the same
            spelt out, (*batch, Hk, G, L, D). Results have its shape without D.
        key, value: (*batch, Hk, N, D) and (*batch, Hk, N, E), of the query's dtype and device; a batch of any number of
            dimensions, none included. Hidden keys must be finite too, and so must their scores.
        log_weight: log-weights below +inf, or booleans of which True keeps a key; broadcasts to (*batch, H, L, N). For a
            query (*batch, Hk, G, L, D) to (*batch, Hk, G, L, N), given with all its dimensions, or with two or fewer. Of
            float dtype it has a gradient; one a query and key (not one a key for all queries) is then the reference's.
        scale: inverse temperature; D^-½ by default. A number, or a tensor: of one number, one a head (H,), or
            broadcasting to (*batch, H, L, 1); a tensor has a gradient.
        is_causal: query i sees keys 0 … i (upper left aligned).
        window: (left, right) or one number for both: query i sees keys i − left … i + right; with `is_causal`, right is
            0. In time and memory linear in queries and keys.
        query_offset: query i stands at position i + query_offset, so that new queries see what a cache holds: with
            `is_causal` keys 0 … i + query_offset, with a window keys from and to there. It may be negative: N − L aligns
            the last query with the last key (lower right aligned), and queries before all keys see none.
        documents: boundaries of a packed row: queries see keys of their own document, in which `is_causal`, `window` and
            `query_offset` count, each with an offset of its own if `Documents` has some. Equal to one call a document, in
            time and memory that follow the documents.
        softcap: c > 0 replaces each score by c·tanh(score/c) before the log-weight is added, as Gemma 2 does.
        sink: log-weight of one more key, at the origin (its score is 0, whatever the scale), to which a query may attend
            instead: log Z becomes log(Z + exp(sink)), and its share of the attention is exp(sink − log Z). A number or a
            tensor like `scale`, −inf for none; a tensor has a gradient. Without a value these are the sinks of gpt-oss, and
            0 is softmax "off by one".
        sink_value: the sink's value, zero by default: finite, one (E,), one a head (H, E), or broadcasting to
            (*batch, H, L, E); it has a gradient. With it the sink is a prior worth exp(sink) tokens of this value (X4, Z3): a
            query that sees no key has it as output.
        backend: "auto" takes the first of these that does not refuse. "fused": PyTorch's fused CPU kernel, exact
            gradients for both results, no soft cap. "cudnn", "flash", "efficient": its kernels for CUDA, and "flex", its
            FlexAttention, which is compiled at the first call: each is proved before it is used. "blocks": tiles of scores,
            on the CPU and on CUDA, where no derivative may be wanted. "reference": plain operations, in blocks of queries that
            are computed again in the backward pass; right on every device.

    Both are differentiable any number of times, forwards too, and under `torch.func` transforms; second derivatives are
    computed in blocks of queries by the reference's formulas. `torch.compile` works; PyTorch cannot differentiate
    twice through an already compiled function: inside one, take derivatives with `torch.func`. Under `torch.autocast`
    query, key and value are cast to its dtype, as for PyTorch's own attention (float64 is not); log Z is float32 there.
    A query that sees no key has output 0, log Z = −inf (with a sink: its value and log-weight) and gradient 0, whatever it
    holds. NaN in a query, in a key or log-weight that it sees, or a score of +inf, makes its results NaN; scores of −inf
    alone are no keys. Log Z is float64 for float64, else float32; relative errors are a few units of the input's rounding,
    and a small cotangent of log Z is not lost beside a large one of the output. In half precision the fused CPU kernel's
    exponential is a cubic, so that its log Z is right to 1.2e-4 nats; the other CPU backends keep float32's digits.

    Raises:
        TypeError: not a tensor, not of 16-, 32- or 64-bit floating point, dtypes that differ, an option of another type.
        ValueError: shapes or devices that do not fit (both are named), an option out of its range, an unknown backend,
            one that refuses (its reason is given).

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> key, value = torch.tensor([1.0, 3.0]).log().view(1, 1, 2, 1), torch.tensor([0.0, 4.0]).view(1, 1, 2, 1)
        >>> output, log_z = ops.attention(torch.ones(1, 1, 1, 1), key, value)
        >>> round(output.item(), 3), round(log_z.exp().item(), 3)  # weights 1/4 and 3/4
        (3.0, 4.0)
    """
    if value is None:
        raise TypeError("value must be a tensor, got None; massieu.ops.log_partition needs no value")
    others = (log_weight, window, documents, softcap, sink, sink_value)
    if _is_direct(query, key, value, scale, is_causal, query_offset, backend, others):
        return AttentionResult(*direct.results(query, key, value, scale, is_causal, False))  # pyright: ignore
    query, key, value = in_autocast_dtype(query, key, value)
    problem = check_problem(
        query, key, value, log_weight, scale, is_causal, window, softcap, sink, sink_value, query_offset, documents
    )
    output, log_z = observed(problem, attend, problem, backend)
    return AttentionResult(problem.restore(output), problem.restore(log_z))


def log_partition(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    sink: Sink = None,
    backend: AttentionBackend = "auto",
) -> Float[Tensor, "*query"]:
    """The log-partition of softmax attention, log Σ_n w_n exp(scale·query·key_n), in nats, in linear memory.

    Arguments, guarantees and errors are those of `attention`. Its gradient with respect to the query is
    scale·Σ p_n key_n: attention with values = keys (S3), unless there is a soft cap.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> log_z = ops.log_partition(torch.zeros(1, 1, 1, 2), torch.randn(1, 1, 8, 2))
        >>> round(log_z.exp().item(), 3)  # every score is 0
        8.0
    """
    others = (log_weight, window, documents, softcap, sink)
    if _is_direct(query, key, key, scale, is_causal, query_offset, backend, others):
        return direct.results(query, key, key.detach(), scale, is_causal, True)[1]  # pyright: ignore
    query, key = in_autocast_dtype(query, key)
    problem = check_problem(
        query,
        key,
        None,
        log_weight,
        scale,
        is_causal,
        window,
        softcap,
        sink,
        query_offset=query_offset,
        documents=documents,
    )
    (log_z,) = attend_without_sink(problem, backend)
    if problem.sink is not None:
        log_z = with_sink.shares(log_z, problem)[0]
    return problem.restore(log_z)


def _is_direct(*arguments: Any) -> bool:
    """Whether the CPU kernel is the first choice and takes the caller's own tensors; compiled code goes the long way."""
    return not torch.compiler.is_compiling() and BACKENDS[0] is CPU and direct.suits(*arguments)


def attend(problem: AttentionProblem, backend: AttentionBackend = "auto") -> tuple[Tensor, ...]:
    """Output and log Z in the common layout, with the sink."""
    output, log_z = attend_without_sink(problem, backend)
    if problem.sink is None:
        return output, log_z
    return with_sink.attention(output, log_z, problem)


def attend_without_sink(problem: AttentionProblem, backend: AttentionBackend = "auto") -> tuple[Tensor, ...]:
    """Output, where there are values, and log Z, in the common layout and without the sink."""
    if problem.documents is not None:
        backends.check_name(backend, BACKENDS)
        if backend in ("auto", "flash") and PACKED_FLASH.refuses(problem) is None:
            return PACKED_FLASH.forward(problem)
        # Each part chooses its backend: documents that are padded to one length are masked, which some backends refuse.
        return packed_rows.apply(lambda part: attend_without_sink(part, backend), problem)
    if problem.queries_before_keys:
        backends.check_name(backend, BACKENDS)
        whole = partial(attend_without_sink, backend=backend)
        return band.after_queries_before_keys(whole, attend_without_sink, problem)
    chosen = backends.choose(backend, BACKENDS, problem)
    if chosen.bands:
        return chosen.forward(problem)
    return band.apply(chosen.forward, problem, without_keys=attend_without_sink)
