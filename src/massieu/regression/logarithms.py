"""The exponential kernel by its logarithm: what of it is exponentiated only at the end, beside what it multiplies."""

import math
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.transforms import every, unwrapped
from massieu.foundation.values import Value
from massieu.regression.kernels import ExponentialKernel, Kernel


class Logarithms(Value):
    """κ(a, b) = exp(h(a) + h(b))·κ'(a, b) at the keys.

    Of a key's coefficient α only exp(2h − c)·α is formed, which is of the size of its value, and of a query's κ(q, key) only
    κ(q, key)·exp(−2h) in units of the largest of them.
    """

    kernel: ExponentialKernel
    half: Float[Tensor, "B H N"]
    """h of each key."""
    centre: Float[Tensor, "B H 1"]
    """c, the middle of their range. Results do not depend on it: it has no derivative."""

    @classmethod
    def of(cls, kernel: ExponentialKernel, key: Float[Tensor, "B H N D"]) -> Self:
        """Raises ValueError where κ(key, key) of one head span more than the dtype does."""
        half = kernel.log_diagonal(key) / 2
        fixed = half.detach() if key.shape[2] else half.new_zeros(*half.shape[:2], 1)
        low, high = fixed.amin(-1, keepdim=True), fixed.amax(-1, keepdim=True)
        widest = math.log(torch.finfo(key.dtype).max)
        if not every(high - low <= widest):
            least, most = 2 * unwrapped(low).min().item(), 2 * unwrapped(high).max().item()
            raise ValueError(
                f"the keys of one head have kernel values κ(key, key) from exp({least:.4g}) to exp({most:.4g}), farther "
                f"apart than {key.dtype} holds: keys of a smaller scale are needed, or float64"
            )
        return cls(kernel, half, (low + high) / 2)

    @property
    def relative(self) -> Float[Tensor, "B H N"]:
        """h − c."""
        return self.half - self.centre

    def half_at(self, query: Float[Tensor, "B H Q D"]) -> Float[Tensor, "B H Q"]:
        """h of each query."""
        return self.kernel.log_diagonal(query) / 2

    def pairs(
        self, query: Float[Tensor, "B H Q D"], key: Float[Tensor, "B H N D"], seen: Bool[Tensor, "Q N"] | None = None
    ) -> tuple[Float[Tensor, "B H Q N"], Float[Tensor, "B H Q"]]:
        """κ(q, k)·exp(−2h(k)) in units of a query's largest, 0 where not seen; and the logarithm of the largest.

        Results do not depend on the unit: it has no derivative.
        """
        ratio = self.kernel.log(query, key) - 2 * self.half.unsqueeze(-2)
        if seen is not None:
            ratio = torch.where(seen, ratio, -torch.inf)
        largest = ratio.detach().amax(-1) if key.shape[2] else query.new_zeros(query.shape[:-1])
        return (ratio - largest.unsqueeze(-1)).exp(), largest

    def as_kernel(self) -> "FromLargest":
        """`pairs` as a kernel of points with one more coordinate: a query's largest, a key's 2h."""
        return FromLargest(self.kernel)

    def keys(self, key: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D+1"]:
        """Keys for `as_kernel`."""
        return with_last(key, 2 * self.half)

    def coefficients(self, solved: Float[Tensor, "B H N E"]) -> Float[Tensor, "B H N E"]:
        """exp(2h − c)·α of a solution exp(h)·α."""
        return self.relative.exp().unsqueeze(-1) * solved


class FromLargest(Kernel):
    """exp(log κ(q, k) − 2h(k) − largest(q)); the last coordinate of a query is its largest, that of a key its 2h."""

    kernel: ExponentialKernel

    def __call__(self, left: Float[Tensor, "B H L D+1"], right: Float[Tensor, "B H N D+1"]) -> Tensor:
        """For all pairs."""
        exponent = self.kernel.log(left[..., :-1], right[..., :-1])
        return (exponent - right[..., None, :, -1] - left[..., -1:]).exp()

    def diagonal(self, points: Float[Tensor, "B H N D+1"]) -> Float[Tensor, "B H N"]:
        """As for a query that is a key."""
        return (self.kernel.log_diagonal(points[..., :-1]) - 2 * points[..., -1]).exp()


def with_last(points: Float[Tensor, "B H N D"], last: Float[Tensor, "B H N"]) -> Float[Tensor, "B H N D+1"]:
    """Points with one more coordinate."""
    return torch.cat([points, last.unsqueeze(-1)], -1)


def lifted(number: Float[Tensor, "*shape"], exponent: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """number·exp(exponent), also where the exponential alone is beyond the floating range."""
    half = (exponent / 2).exp()
    return number * half * half
