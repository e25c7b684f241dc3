"""Keys and values in the one layout that all methods work in, and what a ridge may be."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures.value import values_are_readable
from massieu.ops.shapes import AttentionProblem, check_problem, in_autocast_dtype, told
from massieu.posteriors.arguments import check_device
from massieu.regression.kernels import Kernel, LogKernel
from massieu.regression.logarithms import Logarithms

Ridge = float | int | Tensor


@dataclass(frozen=True)
class Tokens:
    """Checked keys and values with weights w and ridge λ, in float32 or float64.

    The system of equations is A = W^½GW^½ + λI, in which a key of weight 0 has an equation of its own: 1·x = 0. Where the
    kernel is given by its logarithm, G = DG'D with D = diag(exp h), and the system is D⁻¹AD⁻¹ = W^½G'W^½ + λD⁻²: the same
    one in units in which no number leaves the floating range.
    """

    kernel: Kernel
    """κ, or κ' of the keys' own size: see `logarithms`."""
    key: Float[Tensor, "B H N D"]
    """Where the weight is 0, a visible key of the same head: every kernel is defined there."""
    target: Float[Tensor, "B H N E"]
    """√w·value, and with `logarithms` times exp(c − h)."""
    root: Float[Tensor, "B H N"]
    """√w."""
    ridge: Float[Tensor, "B H"]
    logarithms: Logarithms | None = None
    """What `kernel`, `target` and `diagonal` leave out of κ; None where they leave out nothing."""

    @property
    def diagonal(self) -> Float[Tensor, "B H N"]:
        """What the system has beyond the Gram matrix."""
        ridge = self.ridge.unsqueeze(-1)
        if self.logarithms is not None:
            ridge = ridge * (-2 * self.logarithms.half).exp()
        return torch.where(self.root > 0, ridge, 1.0)

    def gram_factor(self) -> Float[Tensor, "B H N N"]:
        """The Cholesky factor of the system."""
        gram = self.root.unsqueeze(-1) * self.kernel(self.key, self.key) * self.root.unsqueeze(-2)
        return cholesky(gram + torch.diag_embed(self.diagonal), "Gram matrix")

    def features(self) -> Float[Tensor, "B H N F"] | None:
        """√w·φ(key), where the kernel has fewer features than there are keys; else None."""
        found = self.kernel.features(self.key)
        if found is None or found.shape[-1] >= self.key.shape[-2]:
            return None
        return self.root.unsqueeze(-1) * found


def cholesky(matrix: Float[Tensor, "*lead n n"], what: str) -> Float[Tensor, "*lead n n"]:
    """The lower factor.

    Raises:
        ValueError: the matrix is singular to rounding. Where values cannot be read (compiled, or in a transform), its
            factor is NaN instead.
    """
    factor, status = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    size = matrix.shape[-1]
    if size == 0:
        return factor
    # Rounding of a pivot grows like that of a sum of as many terms, and is relative to its own row: factors of a matrix
    # whose rows have different units are as exact as those of the matrix with a diagonal of ones.
    least = 4 * math.sqrt(size) * torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
    singular = (status != 0) | ~(pivots > least).all(-1)
    if not values_are_readable(matrix):
        return torch.where(singular[..., None, None], torch.nan, factor)
    if bool(singular.any()):
        raise ValueError(
            f"the {what} plus its ridge is singular to rounding in {matrix.dtype} (for {int(singular.sum())} of "
            f"{singular.numel()} heads): a larger ridge is needed, or float64"
        )
    return factor


def check_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel,
    ridge: Ridge | None,
    operator_ridge: Ridge | None,
    log_weight: Tensor | None,
    is_causal: bool,
) -> tuple[AttentionProblem, Tokens]:
    """Check every argument and bring it to the common layout.

    Raises:
        TypeError, ValueError: as `conditional_mean_attention` says.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel must be a massieu.regression.Kernel, got {told(kernel)}")
    if value is None:
        raise TypeError("value must be a tensor, got None")
    query, key, value = in_autocast_dtype(query, key, value)
    problem = check_problem(query, key, value, log_weight, None, is_causal)
    batch, heads, length, _ = key.shape
    dtype = problem.dtype
    if (ridge is None) == (operator_ridge is None):
        raise ValueError(
            f"exactly one of ridge and operator_ridge must be given, got {'none' if ridge is None else 'both'}"
        )
    if operator_ridge is not None and is_causal:
        raise ValueError(
            "operator_ridge does not go with is_causal: the matrix's ridge would grow with each key; give ridge"
        )
    root = _root(problem.log_weight, (batch, heads, length), query, dtype, operator_ridge is not None)
    name, number = ("ridge", ridge) if operator_ridge is None else ("operator_ridge", operator_ridge)
    matrix_ridge = _layout_ridge(name, number, batch, heads, key.device, dtype)
    if operator_ridge is not None:
        count = root.square().sum(-1)
        matrix_ridge = matrix_ridge * torch.where(count > 0, count, 1.0)
    key, value = key.to(dtype), value.to(dtype)
    if log_weight is not None:
        visible = (root > 0).unsqueeze(-1)
        key, value = torch.where(visible, key, _stand_in(key, root)), torch.where(visible, value, 0.0)
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if values_are_readable(tensor) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite where a key is visible, got NaN or infinite numbers")
    target = root.unsqueeze(-1) * value
    if not isinstance(kernel, LogKernel):
        return problem, Tokens(kernel, key, target, root, matrix_ridge)
    logarithms = Logarithms.of(kernel, key)
    target = target * (-logarithms.relative).exp().unsqueeze(-1)
    return problem, Tokens(kernel.normalized(), key, target, root, matrix_ridge, logarithms)


def _stand_in(key: Tensor, root: Tensor) -> Float[Tensor, "B H 1 D"]:
    """The first visible key of each head, or 0. It has no derivative, being multiplied by √w = 0."""
    if not key.shape[2]:
        return key.new_zeros(*key.shape[:2], 1, key.shape[3])
    first = (root > 0).to(torch.uint8).argmax(-1)[..., None, None]
    found = key.detach().gather(2, first.expand(*first.shape[:3], key.shape[3]))
    return torch.where((root > 0).any(-1)[..., None, None], found, 0.0)


def _root(
    log_weight: Tensor | None, shape: tuple[int, ...], query: Tensor, dtype: torch.dtype, relative: bool
) -> Tensor:
    """√w, one a key; of the largest one's where only ratios count."""
    if log_weight is None:
        return torch.ones(shape, dtype=dtype, device=query.device)
    if log_weight.shape[2:4] != (1, 1):
        raise ValueError(
            f"log_weight must be one a key, for all queries and query heads of its head: shape {(*shape[:2], 1, shape[2])} "
            f"or one that broadcasts to it, got {tuple(log_weight.shape)} for query {tuple(query.shape)}"
        )
    weight = log_weight[:, :, 0, 0].expand(shape)
    if weight.dtype == torch.bool:
        return weight.to(dtype)
    if values_are_readable(weight) and not bool((weight < torch.inf).all()):
        raise ValueError("log_weight must be below +inf and not NaN")
    weight = weight.to(dtype)
    if relative and shape[-1]:
        largest = weight.detach().amax(-1, keepdim=True)
        weight = weight - torch.where(largest > -torch.inf, largest, 0.0)
    root = (0.5 * weight).exp()
    if values_are_readable(root) and not bool((root.square() < torch.inf).all()):
        raise ValueError(f"log_weight must have finite weights in {dtype}, got {weight.max().item():g}")
    return root


def _layout_ridge(
    name: str, number: Ridge | None, batch: int, heads: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "B H"]:
    if isinstance(number, bool) or not isinstance(number, float | int | Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {type(number).__name__}")
    if not isinstance(number, Tensor):
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {number}")
        return torch.full((batch, heads), number, dtype=dtype, device=device)
    if not number.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {number.dtype}")
    if tuple(number.shape) not in ((), (1,), (heads,), (batch, heads)):
        raise ValueError(
            f"{name} must be one number, {heads} (one a key head) or of shape {(batch, heads)}, got {tuple(number.shape)}"
        )
    if values_are_readable(number) and not bool(((number >= 0) & number.isfinite()).all()):
        raise ValueError(f"{name} must be finite and not negative, got {number.tolist()}")
    check_device(key=torch.empty((1,), device=device), **{name: number})
    return number.to(device, dtype).expand(batch, heads)


def need_positive(ridge: Float[Tensor, "B H"], what: str) -> None:
    """Raises ValueError for a ridge of 0."""
    if values_are_readable(ridge) and not bool((ridge > 0).all()):
        raise ValueError(f"{what} needs a positive ridge, got {ridge.min().item()}")
