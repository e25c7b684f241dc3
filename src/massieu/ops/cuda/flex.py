"""PyTorch's FlexAttention: the CUDA kernel for soft caps, and for log-weights per query and key that have a gradient.

Its Triton kernel returns log Z and takes a cotangent for it, so that nothing has to be folded into the output. In compiled
code it is a part of the graph. Elsewhere it is compiled by itself, and its forward pass runs once more for the backward
pass: its own graph could be used only once, and not differentiated again. Second derivatives are the reference's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from massieu.foundation.transforms import in_functorch, may_be_differentiated, values_are_readable, without_autocast
from massieu.ops import reference
from massieu.ops.cuda import proof
from massieu.ops.differentiable import BlockSum
from massieu.ops.shapes import AttentionProblem, Band

LEAST_SIZE = 16
"""Least head size: Triton multiplies no narrower matrices."""
BLOCK = 128
"""Queries, and keys, of a tile of a mask."""

Results = tuple[Tensor, ...]


class Flex:
    """The backend of FlexAttention."""

    name = "flex"
    bands = True
    device_type = "cuda"
    compiler = "inductor"

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """Why it cannot take this problem."""
        query = problem.query
        weight = problem.log_weight
        if query.device.type != self.device_type:
            return f"it runs on {self.device_type.upper()}, got {query.device}"
        if self.compiler == "inductor" and find_spec("triton") is None:
            return "it needs Triton, which is not installed"
        if query.dtype == torch.float64:
            return "it has no float64"
        if in_functorch() or forward_ad._current_level >= 0:
            return "it has no torch.func transforms and no forward mode"
        if problem.pairs == 0:
            return "it needs at least one query and one key"
        if weight is not None and weight.numel() >= 2**31:
            return f"it counts log-weights with 32 bits, got {weight.numel():,} of them"
        return proof.failure(self, problem)

    def forward(self, problem: AttentionProblem, *others: Tensor) -> Results:
        """Output ``(B, Hk, G, L, E)``, where there are values, and log-partition ``(B, Hk, G, L)``."""
        fields = {name: getattr(problem, name) for name in ("query", "key", "value", "log_weight", "scale")}
        learned = {
            name: field for name, field in fields.items() if isinstance(field, Tensor) and may_be_differentiated(field)
        }
        if torch.compiler.is_compiling() or not learned:
            return self._run(problem)

        def of_learned(function: Callable[[AttentionProblem], Results]) -> Callable[..., Results]:
            """A function of problems as one of the learned tensors of this problem."""
            return lambda *tensors: function(replace(problem, **dict(zip(learned, tensors, strict=True))))

        def gradient(*arguments: Tensor) -> Results:
            """Gradients of the learned tensors, from these and the cotangents."""
            cotangents = arguments[len(learned) :]
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in arguments[: len(learned)]]
                results = of_learned(self._run)(*leaves)
            places = [place for place, cotangent in enumerate(cotangents) if cotangent is not None]
            # A gradient that the kernel leaves out is an error here, not zero.
            return torch.autograd.grad(
                [results[place] for place in places], leaves, [cotangents[place] for place in places]
            )

        with torch.no_grad():
            results = self._run(problem)
        return BlockSum(of_learned(reference.attention), gradient=gradient)(*learned.values(), known=results)

    def _run(self, problem: AttentionProblem) -> Results:
        """Both results, with derivatives in compiled code only."""
        problem = problem.zero_queries_without_key()
        query = problem.query
        key = problem.key
        scale = problem.scale
        weight = problem.log_weight
        heads = problem.query.shape[1:3]
        if isinstance(scale, Tensor):
            query = (query * scale).to(query.dtype)
            scale = 1.0
        if weight is not None:
            if weight.dtype != torch.bool:
                weight = weight.to(problem.dtype)
            # From (#B, #Hk, #G, #L, #N) to (#B, 1 or Hk·G, #L, #N).
            weight = weight.squeeze(2) if heads[1] == 1 else weight.expand(-1, *heads, -1, -1).flatten(1, 2)
        # The kernel must have values: a few numbers of the keys, whose output is not used.
        value = key.detach()[..., :LEAST_SIZE] if problem.value is None else problem.value
        size = value.shape[-1]
        query, key, value = (_laid_out(tensor) for tensor in (query.flatten(1, 2), key, value))
        # Text, because the compiler would take a number that differs between calls for a variable.
        softcap = None if problem.softcap is None else repr(problem.softcap)
        attend = _attend if torch.compiler.is_compiling() else self._compiled
        with without_autocast(query.device):
            output, log_z = attend(query, key, value, weight, repr(scale), softcap, _tiles_of(problem))
        log_z = log_z.unflatten(1, heads)
        if problem.value is None:
            return (log_z,)
        return output[..., :size].unflatten(1, heads), log_z

    @cached_property
    def _compiled(self) -> Callable[..., Results]:
        options = {"recompile_limit": 256, "isolate_recompiles": True}  # which the overloads do not know
        return torch.compile(_attend, backend=self.compiler, fullgraph=True, **options)  # pyright: ignore[reportCallIssue]


def _laid_out(tensor: Tensor) -> Tensor:
    """A tensor with rows of adjacent numbers, not expanded, and of a head size that Triton takes."""
    if tensor.shape[-1] < LEAST_SIZE:
        return F.pad(tensor, (0, LEAST_SIZE - tensor.shape[-1]))
    if tensor.stride(-1) == 1 and 0 not in tensor.stride():
        return tensor
    return tensor.contiguous()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    scale: str,
    softcap: str | None,
    tiles: Results | None,
) -> Results:
    """Output and log Z of queries ``(B, H, L, D)`` and log-weights ``(#B, #H, #L, #N)``."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    cap = None if softcap is None else float(softcap)
    mask = None

    def modified_score(score: Tensor, item: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """The score of one pair, soft-capped and with its log-weight."""
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if weight is None:
            return score
        # A dimension of size 1 is the same for all.
        indices = [
            index if size > 1 else 0 for index, size in zip((item, head, row, column), weight.shape, strict=True)
        ]
        pair_weight = weight[indices[0], indices[1], indices[2], indices[3]]
        return torch.where(pair_weight, score, -torch.inf) if pair_weight.dtype == torch.bool else score + pair_weight

    if tiles is not None:
        low, high, part, places, full, full_places, *transposed = tiles

        def is_seen(item: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (column >= row + low) & (column <= row + high)

        mask = BlockMask(
            (query.shape[2], key.shape[2]),
            part,
            places,
            full,
            full_places,
            *transposed[:4],
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=is_seen,
        )
    output, rest = flex_attention(
        query,
        key,
        value,
        modified_score,
        mask,
        float(scale),
        enable_gqa=query.shape[1] != key.shape[1],
        # The other kernels lack a gradient for log Z, or take only some numbers of heads.
        kernel_options={"BACKEND": "TRITON"},
        return_aux=AuxRequest(lse=True),
    )
    assert rest.lse is not None
    return output, rest.lse


def _tiles_of(problem: AttentionProblem) -> Results | None:
    """`_tiles` of a problem's band, kept from an earlier call where that is safe; None without a band."""
    query = problem.query
    band = problem.band
    if band is None:
        return None
    device = query.device
    length = query.shape[3]
    keys = problem.key.shape[2]
    on_cuda = device.type == "cuda"
    if not values_are_readable(query) or (on_cuda and torch.cuda.is_current_stream_capturing()):
        return _tiles(band, length, keys, device)
    stream = torch.cuda.current_stream(device).cuda_stream if on_cuda else None
    return _kept_tiles(band, length, keys, device, stream)


def _tiles(band: Band, length: int, keys: int, device: torch.device) -> Results:
    """The ends of a band, and which tiles of scores it fills in part and which in full.

    Either as counts and places: of tiles of keys for each tile of queries, and then of tiles of queries for each of keys.
    """
    assert band is not None
    low, high = band
    low = -length if low is None else max(low, -length)
    high = min(high, keys)
    # The first query, and the first key, of each tile.
    query = torch.arange(0, length, BLOCK, device=device)
    key = torch.arange(0, keys, BLOCK, device=device)
    # The least and the largest of key − query in a tile are in two of its corners.
    least = key - (query + BLOCK - 1).clamp(max=length - 1).unsqueeze(1)
    most = (key + BLOCK - 1).clamp(max=keys - 1) - query.unsqueeze(1)
    is_whole = (query + BLOCK <= length).unsqueeze(1) & (key + BLOCK <= keys)
    full = (least >= low) & (most <= high) & is_whole
    part = (most >= low) & (least <= high) & ~full
    ends = tuple(torch.full((), end, dtype=torch.int32, device=device) for end in (low, high))
    return *ends, *_listed(part), *_listed(full), *_listed(part.mT), *_listed(full.mT)


def _listed(chosen: Tensor) -> Results:
    """The number of chosen places in each row, and all places, the chosen ones first."""
    chosen = chosen[None, None].to(torch.int32)
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


@lru_cache(maxsize=32)
def _kept_tiles(band: Band, length: int, keys: int, device: torch.device, stream: int | None) -> Results:
    """`_tiles`, kept for each stream: on another stream they might not have been computed yet when they are read."""
    with torch.inference_mode(False), torch.no_grad():
        return _tiles(band, length, keys, device)


FLEX = Flex()
"""FlexAttention on CUDA."""
