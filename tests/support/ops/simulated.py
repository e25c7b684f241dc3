"""PyTorch's CUDA operators of attention, simulated on the CPU with what each of them gives, wants and reads without looking.

They are used in place of `torch.ops.aten` by the very code that runs on a GPU. `Wrong` has the faults that a version, a driver
or another make of device might have.
"""

import contextlib
import importlib
from itertools import pairwise

import torch

from massieu.ops import reference, tiles
from massieu.ops.cuda import cudnn, efficient, flash, kernel, proof

HALVES = torch.bfloat16, torch.float16
REGISTRY = importlib.import_module("massieu.ops.attention")
KERNELS = {"flash": flash.FLASH, "efficient": efficient.EFFICIENT, "cudnn": cudnn.CUDNN}


@contextlib.contextmanager
def on_the_cpu(monkeypatch, operators=None):
    """CUDA's kernels stand where the CPU's stood; verdicts of before are forgotten, then and after."""
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "operators", Operators() if operators is None else operators)
        patch.setattr(kernel.CudaKernel, "device_type", "cpu")
        patch.setattr(cudnn.CudnnKernel, "missing", staticmethod(lambda device: None))
        patch.setattr(proof, "_verdicts", {})
        patch.setattr(proof, "_warned", set())
        # No operator here has blocks, so that a smaller problem proves as much.
        patch.setattr(proof, "LENGTHS", (35, 75))
        rest = tiles.Blocks(tiles.attention), reference.Reference(reference.attention)
        patch.setattr(REGISTRY, "BACKENDS", (cudnn.CUDNN, flash.FLASH, efficient.EFFICIENT, *rest))
        yield


class Operators:
    """All six operators, right."""

    base = 1.0
    """What log Z is divided by."""
    missing = 0.0
    """The output of a row without a key."""

    # --- FlashAttention: (B, L, H, D), half precision, bands from the lower right, grouped, log Z of an empty row +inf

    def _flash_attention_forward(self, query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale,
                                 window_size_left, window_size_right):  # fmt: skip
        if cum_q is not None:
            return self._packed(cum_q, cum_k, (query, key, value), max_q, max_k, causal, debug, dropout, scale=scale,
                                window_size_left=window_size_left, window_size_right=window_size_right)  # fmt: skip
        _check_flash(query, key, value, max_q, max_k)
        hidden = self._flash_hidden(query.shape[1], key.shape[1], causal, window_size_left, window_size_right)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, log_z = _forward(q, _repeat(k, q), _repeat(v, q), None, hidden, scale)
        log_z = torch.where((log_z == -torch.inf) | log_z.isnan(), torch.inf, log_z / self.base)
        return output.transpose(1, 2).contiguous(), log_z, None, None, None

    def _flash_attention_backward(self, grad, query, key, value, output, log_z, cum_q, cum_k, max_q, max_k, dropout, causal,
                                  seed, offset, *, scale, window_size_left, window_size_right):  # fmt: skip
        if cum_q is not None:
            return self._packed(cum_q, cum_k, (query, key, value, grad, output), max_q, max_k, causal, seed, dropout,
                                log_z, scale=scale, window_size_left=window_size_left,
                                window_size_right=window_size_right)  # fmt: skip
        _check_flash(query, key, value, max_q, max_k)
        _check(grad)
        hidden = self._flash_hidden(query.shape[1], key.shape[1], causal, window_size_left, window_size_right)
        q, k, v, g = (tensor.transpose(1, 2) for tensor in (query, key, value, grad))
        delta = self._delta(grad.contiguous(), output.contiguous()).transpose(1, 2)
        dq, dk, dv = _backward(g, q, _repeat(k, q), _repeat(v, q), delta, log_z * self.base, None, hidden, scale)
        dk, dv = (each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (dk, dv))
        return tuple(each.transpose(1, 2).to(query.dtype) for each in (dq, dk, dv))

    def _packed(self, cum_q, cum_k, tensors, max_q, max_k, causal, rest, dropout, log_z=None, **options):
        """Documents one after the other: (T, H, D), log Z (H, T)."""
        if cum_q.dtype != torch.int32 or cum_q[-1] != len(tensors[0]) or cum_k[-1] != len(tensors[1]):
            raise RuntimeError("cu_seqlens must be int32 and end where the rows do")
        made = []
        for (first, last), (start, end) in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True):
            if last - first > max_q or end - start > max_k:
                raise RuntimeError("max_seqlen")
            places = [slice(first, last), slice(start, end), slice(start, end), slice(first, last), slice(first, last)]
            parts = [tensor[place].unsqueeze(0) for tensor, place in zip(tensors, places, strict=False)]
            sizes = last - first, end - start
            if 0 in sizes:
                made.append(self._empty(parts, log_z is None))
            elif log_z is None:
                output, level, *_ = self._flash_attention_forward(
                    *parts, None, None, *sizes, dropout, causal, rest, **options
                )
                made.append((output[0], level[0].mT))
            else:
                query, key, value, grad, output = parts
                own = log_z[:, first:last].unsqueeze(0)
                found = self._flash_attention_backward(
                    grad, query, key, value, output, own, None, None, *sizes, dropout, causal, rest, None, **options
                )
                made.append(tuple(each[0] for each in found if each is not None))
        joined = [torch.cat(each) for each in zip(*made, strict=True)]
        return (joined[0], joined[1].mT.contiguous(), None, None, None) if log_z is None else tuple(joined)

    def _empty(self, parts, forward):
        query, key, value, *_ = (part[0] for part in parts)
        if forward:
            return torch.zeros_like(query), torch.full(query.shape[:2], torch.inf)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    def _flash_hidden(self, length, keys, causal, left, right):
        ahead = torch.arange(keys) - torch.arange(length)[:, None] - (keys - length)
        right = 0 if causal else right
        return (right >= 0) & (ahead > right) | (left >= 0) & (ahead < -left)

    # --- memory-efficient: (B, H, L, D) of equal heads, masks of the query's dtype, log Z in rows up to a multiple of 32

    def _scaled_dot_product_efficient_attention(self, query, key, value, bias, with_log_z, dropout, causal, *, scale):
        _check_efficient(query, key, value, bias, with_log_z)
        hidden = _causal(query.shape[2], key.shape[2]) if causal else None
        output, log_z = _forward(query, key, value, bias, hidden, scale)
        output = torch.where((log_z == -torch.inf).unsqueeze(-1), self.missing, output.float()).to(query.dtype)
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        rows = -log_z.shape[-1] % 32
        return output, torch.nn.functional.pad(log_z / self.base, (0, rows), value=torch.inf), None, None

    def _scaled_dot_product_efficient_attention_backward(self, grad, query, key, value, bias, output, log_z, seed, offset,
                                                         dropout, wanted, causal, *, scale):  # fmt: skip
        _check_efficient(query, key, value, bias, True)
        _check(grad)
        length = query.shape[2]
        if log_z.shape[-1] != length + -length % 32:
            raise RuntimeError("log_z must have rows up to a multiple of 32")
        if not (log_z[..., length:] == torch.inf).all():
            raise RuntimeError("rows that are none must have no weights")
        # The kernel takes rows to be next to each other but for the heads, and looks at two strides alone.
        batch, heads, _, size = output.shape
        places = sum(
            torch.arange(count).view(shape) * stride
            for count, stride, shape in (
                (batch, output.stride(0), (-1, 1, 1, 1)),
                (heads, output.stride(1), (-1, 1, 1)),
                (length, heads * size, (-1, 1)),
                (size, 1, (-1,)),
            )
        )
        memory = output.as_strided((output.untyped_storage().nbytes() // output.element_size(),), (1,), 0)
        read = memory[(places + output.storage_offset()) % len(memory)]
        hidden = _causal(length, key.shape[2]) if causal else None
        log_z = log_z[..., :length] * self.base
        found = _backward(grad, query, key, value, self._delta(grad, read), log_z, bias, hidden, scale)
        return *(each.to(query.dtype) for each in found), None

    # --- cuDNN: (B, H, L, D), half precision, grouped, masks; the cotangent in the output's layout

    def _scaled_dot_product_cudnn_attention(
        self, query, key, value, bias, with_log_z, dropout, causal, debug, *, scale
    ):
        _check_cudnn(query, key, bias)
        hidden = _causal(query.shape[2], key.shape[2]) if causal else None
        output, log_z = _forward(query, _repeat(key, query), _repeat(value, query), bias, hidden, scale)
        return output, (log_z / self.base).unsqueeze(-1), None, None, 0, 0, None, None, None

    def _scaled_dot_product_cudnn_attention_backward(self, grad, query, key, value, output, log_z, seed, offset, bias, cum_q,
                                                     cum_k, max_q, max_k, dropout, causal, *, scale):  # fmt: skip
        _check_cudnn(query, key, bias)
        if not grad.stride() == output.stride() == torch.empty_like(query).stride():
            # A graph that was made for one layout of them would be used for another.
            raise RuntimeError("the output and its cotangent must be laid out as the forward pass lays out its output")
        if log_z.shape != (*query.shape[:3], 1) or (max_q, max_k) != (query.shape[2], key.shape[2]):
            raise RuntimeError("log_z must have shape (B, H, L, 1)")
        hidden = _causal(query.shape[2], key.shape[2]) if causal else None
        k, v, log_z = _repeat(key, query), _repeat(value, query), log_z.squeeze(-1) * self.base
        dq, dk, dv = _backward(grad, query, k, v, self._delta(grad, output), log_z, bias, hidden, scale)
        dk, dv = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (dk, dv))
        return tuple(each.to(query.dtype) for each in (dq, dk, dv))

    def _delta(self, grad, output):
        return (grad.float() * output.float()).sum(-1)


class Base2(Operators):
    """log Z in base 2."""

    base = torch.tensor(2.0).log().item()


class OwnDelta(Operators):
    """The backward pass does not read the output that it is given."""

    def _delta(self, grad, output):
        return torch.zeros(grad.shape[:-1])


class UpperLeft(Operators):
    """FlashAttention with bands from the upper left, as it was before its release 2.1."""

    def _flash_hidden(self, length, keys, causal, left, right):
        ahead = torch.arange(keys) - torch.arange(length)[:, None]
        return (right >= 0) & (ahead > right) | (left >= 0) & (ahead < -left)


class HalfLogZ(Operators):
    """log Z through half precision."""

    def _flash_attention_forward(self, *given, **options):
        output, log_z, *rest = super()._flash_attention_forward(*given, **options)
        return output, log_z.bfloat16().float(), *rest


class EmptyIsNan(Operators):
    """A row without a key makes NaN."""

    missing = float("nan")


class Raising:
    """No kernel for this device."""

    def __getattr__(self, name):
        raise RuntimeError("no kernel image is available for execution on the device")


WRONG = {
    "log Z in base 2": (Base2, ("flash", "efficient", "cudnn")),
    "the output is not read": (OwnDelta, ("flash", "efficient", "cudnn")),
    "bands from the upper left": (UpperLeft, ("flash",)),
    "log Z of half precision": (HalfLogZ, ("flash",)),
    "NaN for an empty row": (EmptyIsNan, ("efficient",)),
    "it raises": (Raising, ("flash", "efficient", "cudnn")),
}


# --- what they do ----------------------------------------------------------------------------------------------------


def _forward(query, key, value, bias, hidden, scale):
    scores = _scores(query, key, bias, hidden, scale)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    output = (weights.to(query.dtype).float() @ value.float()) / torch.where(total == 0, 1.0, total)
    return output.to(query.dtype), (top + total.log()).squeeze(-1)


def _scores(query, key, bias, hidden, scale):
    scores = query.float() @ key.float().mT * scale
    scores = scores if bias is None else scores + bias.float()
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _backward(grad, query, key, value, delta, log_z, bias, hidden, scale):
    weights = (_scores(query, key, bias, hidden, scale) - log_z.unsqueeze(-1)).exp()
    change = (weights * (grad.float() @ value.float().mT - delta.unsqueeze(-1))).to(query.dtype).float() * scale
    return change @ key.float(), change.mT @ query.float(), weights.to(query.dtype).float().mT @ grad.float()


def _causal(length, keys):
    return torch.arange(keys) > torch.arange(length)[:, None]


def _repeat(tensor, query):
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _check(query, *others):
    for tensor in (query, *others):
        if tensor.dtype != query.dtype or tensor.stride(-1) != 1 or tensor.shape[-1] % 8:
            raise RuntimeError("one dtype, rows of adjacent numbers, a multiple of 8 of them")
        if any(place % (16 // tensor.element_size()) for place in (tensor.storage_offset(), *tensor.stride()[:-1])):
            raise RuntimeError("rows must begin at multiples of 16 bytes")


def _check_flash(query, key, value, max_q, max_k):
    _check(query, key, value)
    if query.dtype not in HALVES or query.shape[-1] > 256 or query.shape[2] % key.shape[2]:
        raise RuntimeError("FlashAttention only supports fp16 and bf16, and heads of up to 256")
    if (max_q, max_k) != (query.shape[1], key.shape[1]):
        raise RuntimeError("lengths")


def _check_efficient(query, key, value, bias, with_log_z):
    _check(query, key, value)
    if query.dtype == torch.float64 or query.shape[:2] != key.shape[:2] or not with_log_z:
        raise RuntimeError("equal heads")
    if bias is not None and (
        bias.shape != (*query.shape[:3], key.shape[2])
        or bias.dtype != query.dtype
        or bias.stride(-1) != 1
        or any(place % 16 for place in (bias.storage_offset(), *bias.stride()[:-1]))
    ):
        raise RuntimeError("attn_bias: wrong shape, dtype or alignment")


def _check_cudnn(query, key, bias):
    _check(query, key)
    if query.dtype not in HALVES or query.shape[-1] > 128 or min(query.shape[2], key.shape[2]) < 2:
        raise RuntimeError("cuDNN takes half precision, heads of up to 128 and no single queries")
    if bias is not None and (bias.dtype != query.dtype or bias.shape[-2:] != (query.shape[2], key.shape[2])):
        raise RuntimeError("cuDNN's bias is of the query's dtype")
