"""The exponential kernel by its logarithm: large factors are exponentiated only together with what they multiply."""

import math
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.transforms import all_true, unwrapped
from massieu.foundation.values import Value
from massieu.regression.kernels import ExponentialKernel, Kernel


class Logarithms(Value):
    """The factors exp h of κ(a, b) = exp(h(a) + h(b))·κ'(a, b) at the keys, by their logarithms.

    A key's coefficient α appears only as exp(2h − c)·α, which is of the size of its value. A query's kernel values appear
    only as κ(q, key)·exp(−2h), in units of the largest of them.
    """

    kernel: ExponentialKernel
    half: Float[Tensor, "B H N"]
    """h of each key."""
    centre: Float[Tensor, "B H 1"]
    """c, the middle of their range. Results do not depend on it: it has no derivative."""

    @classmethod
    def of(cls, kernel: ExponentialKernel, key: Float[Tensor, "B H N D"]) -> Self:
        """Raises ValueError if the values κ(key, key) of one head span more than the range of the dtype."""
        half = kernel.log_diagonal(key) / 2
        without_derivative = half.detach() if key.shape[2] else half.new_zeros(*half.shape[:2], 1)
        low = without_derivative.amin(-1, keepdim=True)
        high = without_derivative.amax(-1, keepdim=True)
        widest = math.log(torch.finfo(key.dtype).max)
        if not all_true(high - low <= widest):
            least_log = 2 * unwrapped(low).min().item()
            largest_log = 2 * unwrapped(high).max().item()
            raise ValueError(
                f"the keys of one head have kernel values κ(key, key) from exp({least_log:.4g}) to exp({largest_log:.4g}), "
                f"farther apart than {key.dtype} holds: keys of a smaller scale are needed, or float64"
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
        """κ(q, k)·exp(−2h(k)) in units of a query's largest, 0 for keys not seen; and the logarithm of that unit.

        Results do not depend on the unit, so that it has no derivative.
        """
        log_ratio = self.kernel.log(query, key) - 2 * self.half.unsqueeze(-2)
        if seen is not None:
            log_ratio = torch.where(seen, log_ratio, -torch.inf)
        largest = log_ratio.detach().amax(-1) if key.shape[2] else query.new_zeros(query.shape[:-1])
        return (log_ratio - largest.unsqueeze(-1)).exp(), largest

    def as_kernel(self) -> "FromLargest":
        """`pairs` as a kernel of points with one more coordinate: a query's largest, a key's 2h."""
        return FromLargest(self.kernel)

    def keys(self, key: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D+1"]:
        """Keys for `as_kernel`."""
        return with_last(key, 2 * self.half)

    def coefficients(self, solution: Float[Tensor, "B H N E"]) -> Float[Tensor, "B H N E"]:
        """exp(2h − c)·α from a solution exp(h)·α of the scaled equations."""
        return self.relative.exp().unsqueeze(-1) * solution


class FromLargest(Kernel):
    """exp(log κ(q, k) − 2h(k) − largest(q)); the last coordinate of a query is its largest, that of a key its 2h."""

    kernel: ExponentialKernel

    def __call__(self, left: Float[Tensor, "B H L D+1"], right: Float[Tensor, "B H N D+1"]) -> Tensor:
        """For all pairs."""
        exponent = self.kernel.log(left[..., :-1], right[..., :-1])
        return (exponent - right[..., None, :, -1] - left[..., -1:]).exp()

    def diagonal(self, points: Float[Tensor, "B H N D+1"]) -> Float[Tensor, "B H N"]:
        """κ'(x, x) of keys, each as its own query."""
        return (self.kernel.log_diagonal(points[..., :-1]) - 2 * points[..., -1]).exp()


def with_last(points: Float[Tensor, "B H N D"], last: Float[Tensor, "B H N"]) -> Float[Tensor, "B H N D+1"]:
    """Points with one more coordinate."""
    return torch.cat([points, last.unsqueeze(-1)], -1)


def lifted(number: Float[Tensor, "*shape"], exponent: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """number·exp(exponent), also if the exponential alone would overflow or underflow."""
    root = (exponent / 2).exp()
    return number * root * root
