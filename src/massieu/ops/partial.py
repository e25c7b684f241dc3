"""Attention over a part of the keys: results of disjoint parts merge into that of all, exactly and in any order."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import described, floating, instance, whole_number
from massieu.foundation.transforms import may_be_differentiated
from massieu.ops.attention import AttentionResult
from massieu.ops.shapes import check_alike


class Partial(NamedTuple):
    """The log-partition over some of the keys, and the mean of their values under the weights of each query.

    The result over two disjoint sets of keys follows from the results over either: log Z = log(Z₁ + Z₂), and the means are
    averaged with weights softmax(log Z₁, log Z₂). So parts may be computed anywhere and merged in any order and grouping, to
    rounding. A part without a visible key (log Z = −inf) changes nothing, whatever its mean.

    A part need not come from keys: log-partition b and mean v are a sink, to which a query may attend instead.

    Make one by `Partial.of(attention(query, some_keys, some_values))`. Merging checks all parts.

    Example:
        >>> import torch
        >>> from massieu.ops import Partial
        >>> one = Partial(torch.zeros(1), torch.zeros(1, 1))
        >>> both = one.merge(Partial(torch.full((1,), 3.0).log(), torch.full((1, 1), 4.0)))
        >>> round(both.log_partition.exp().item(), 3), round(both.mean.item(), 3)  # 1 + 3, ¾ of 4
        (4.0, 3.0)
    """

    log_partition: Float[Tensor, "*query"]
    """log Z in nats, float32 or float64."""
    mean: Float[Tensor, "*query E"]
    """Σ p_n value_n over these keys, in the same dtype."""

    @classmethod
    def of(cls, attention: AttentionResult) -> Self:
        """The result of `massieu.ops.attention` over some keys; its output is widened to the dtype of log Z.

        Raises:
            TypeError, ValueError: it is no `AttentionResult`, or its two tensors do not fit each other.
        """
        instance("attention", attention, AttentionResult, "an AttentionResult")
        floating("output", attention.output)
        floating("log_partition", attention.log_partition)
        part = cls(attention.log_partition, attention.output.to(attention.log_partition.dtype))
        _check(part)
        return part

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Self:
        """The result over no keys, with log Z = −inf: merging it with another part gives that part.

        Args:
            shape: of the log-partition.
            size: of a value.

        Raises:
            TypeError, ValueError: sizes that are not whole numbers of at least 0, a dtype other than float32 and float64, or
                a device that does not exist.
        """
        if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
            raise TypeError(f"shape must be of whole numbers, got {described(shape)}")
        for name, number in (*(("a size of shape", length) for length in shape), ("size", size)):
            if not isinstance(number, torch.SymInt):
                whole_number(name, number, least=0)
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
            got = dtype if isinstance(dtype, torch.dtype) else described(dtype)
            raise TypeError(f"dtype must be torch.float32 or torch.float64, got {got}")
        device = _checked_device(device)
        log_z = torch.full(tuple(shape), -torch.inf, dtype=dtype, device=device)
        return cls(log_z, torch.zeros(*shape, size, dtype=dtype, device=device))

    def merge(self, *others: "Partial") -> "Partial":
        """The result over the keys of this part and all others, which must be disjoint.

        Exact derivatives of every order, forwards too, under `torch.func` and `torch.compile`. The gradient for a
        part's log Z is p·(g + grad·(mean_part − mean)) with p its share of Z: differences of means, so that a constant
        in all values costs no digits.

        Raises:
            TypeError: something is not a `Partial` of floating-point tensors, or dtypes differ.
            ValueError: shapes or devices differ (both are named).
        """
        parts = (self, *others)
        for part in parts:
            _check(part)
            check_alike(**{"one part": self.mean, "another": part.mean})
            if part.mean.shape != self.mean.shape:
                shapes = f"{tuple(self.mean.shape)} and {tuple(part.mean.shape)}"
                raise ValueError(f"parts must have means of one shape, got {shapes}")
        levels, means = zip(*parts, strict=True)
        return Partial(torch.stack(levels), torch.stack(means)).reduce(0)

    def reduce(self, dim: int) -> "Partial":
        """Merge the parts that lie along one dimension of the log-partition; as `merge`, for any number of them.

        Raises:
            TypeError: as `merge`.
            ValueError: the shapes do not fit, or there is no such dimension.
        """
        _check(self)
        count = self.log_partition.ndim
        if not -count <= whole_number("dim", dim) < count:
            raise ValueError(
                f"dim must be a dimension of the log-partition {tuple(self.log_partition.shape)}, got {dim}"
            )
        dim %= count
        # Values first, as constants; then derivatives, by sums that are known at these values.
        anchor = _merged(Partial(self.log_partition.detach(), self.mean.detach()), dim)
        if not may_be_differentiated(*self):
            return anchor
        weight, moment = shares(anchor.unsqueeze(dim), self)
        return around(anchor, weight.sum(dim), moment.sum(dim))

    def unsqueeze(self, dim: int) -> "Partial":
        """One more dimension of size 1, before dimension `dim` of the log-partition, or after its last.

        Raises:
            TypeError, ValueError: as `reduce`; dim is counted from the front.
        """
        _check(self)
        whole_number("dim", dim, least=0, most=self.log_partition.ndim)
        return Partial(self.log_partition.unsqueeze(dim), self.mean.unsqueeze(dim))


def shares(anchor: Partial, part: Partial) -> tuple[Tensor, Tensor]:
    """A part's share p of the anchor's Z, and p·(mean − the anchor's mean).

    The merged result is log Z + log Σp and mean + Σp·(mean_part − mean)/Σp with log Z and mean of the anchor. It does not
    depend on the anchor, which can therefore be a constant: all derivatives, of every order, are those of the two sums.
    """
    hidden = part.log_partition == -torch.inf
    level = anchor.log_partition.masked_fill(anchor.log_partition == -torch.inf, 0.0)
    weight = (part.log_partition - level).masked_fill(hidden, -torch.inf).exp()
    deviation = torch.where(hidden.unsqueeze(-1), 0.0, part.mean - anchor.mean)
    return weight, weight.unsqueeze(-1) * deviation


def around(anchor: Partial, weight: Tensor, moment: Tensor) -> Partial:
    """The merged result from the sums of `shares` over all parts."""
    empty = anchor.log_partition == -torch.inf
    total = torch.where(empty, 1.0, weight)
    return Partial(anchor.log_partition + total.log(), anchor.mean + moment / total.unsqueeze(-1))


def _merged(parts: Partial, dim: int) -> Partial:
    """The merged values, without derivatives."""
    log_zs, means = parts
    if log_zs.shape[dim] == 0:
        return Partial(log_zs.sum(dim) - torch.inf, means.sum(dim))
    top = log_zs.amax(dim, keepdim=True)
    has_no_key = log_zs == -torch.inf
    weights = (log_zs - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(dim, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    # Where no part has a visible key the log is 0 and the top is −inf, and so is their sum.
    log_z = (total.log() + top).squeeze(dim)
    share = torch.where(has_no_key, 0.0, weights / total).unsqueeze(-1)
    # The mean of a part without a visible key may be anything, NaN too.
    return Partial(log_z, (share * torch.where(has_no_key.unsqueeze(-1), 0.0, means)).sum(dim))


def _check(part: Partial) -> None:
    """Raise a TypeError or ValueError unless this is a `Partial` whose tensors fit each other."""
    log_z, mean = instance("a part", part, Partial, "a Partial")
    check_alike(log_partition=log_z, mean=mean)
    if log_z.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"log_partition and mean must be float32 or float64, got {log_z.dtype}")
    if mean.ndim != log_z.ndim + 1 or mean.shape[:-1] != log_z.shape:
        raise ValueError(
            f"mean must have the shape of log_partition {tuple(log_z.shape)} and one more dimension, "
            f"got {tuple(mean.shape)}"
        )


def _checked_device(device: torch.device | str | None) -> torch.device | None:
    """The device of that name; a TypeError or ValueError if there is none."""
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, int | str):
        raise TypeError(f"device must be a torch.device, its name or None, got {type(device).__name__}")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"device must name one of this machine, got {device!r}") from error
