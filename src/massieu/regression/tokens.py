"""Keys and values in the common layout of all methods, and the checks of arguments."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import as_tensor, check_one_device, check_range, instance
from massieu.foundation.transforms import all_true, any_true, in_autocast_dtype, unwrapped, values_are_readable
from massieu.foundation.values import Value, static_field
from massieu.ops.shapes import AttentionProblem, check_problem
from massieu.regression.kernels import ExponentialKernel, Kernel
from massieu.regression.logarithms import Logarithms

Ridge = float | int | Tensor


class SystemsSolved(NamedTuple):
    """How the solution of each system of equations ended, one for each value column; without derivatives."""

    status: Int[Tensor, "B H E"]
    """Values of `massieu.solve.Status`; 0 is converged."""
    residual: Float[Tensor, "B H E"]
    """Relative to the norm of the right side; for an exponential kernel, to the size of each equation."""


class Prediction(NamedTuple):
    """A method's results, with the queries of all heads that share a key head side by side; see `ConditionalMeanResult`."""

    output: Float[Tensor, "B H Q E"]
    variance: Float[Tensor, "B H Q"] | None
    error_bound: Float[Tensor, "B H Q"] | None = None
    convergence: SystemsSolved | None = None


class KeyValuePairs(Value):
    """Checked keys and values with weights w and ridge λ, in float32 or float64.

    The matrix of the equations is A = W^½GW^½ + λI, in which a key of weight 0 has the equation 1·x = 0. If the kernel is
    given by its logarithm, G = DG'D with D = diag(exp h), and the matrix is D⁻¹AD⁻¹ = W^½G'W^½ + λD⁻²: the same equations
    in units in which no number overflows or underflows.
    """

    kernel: Kernel
    """κ; with `logarithms` κ', which has κ'(key, key) = 1."""
    key: Float[Tensor, "B H N D"]
    """A key of weight 0 is replaced by a visible key of the same head, where every kernel is defined."""
    target: Float[Tensor, "B H N E"]
    """√w·value; with `logarithms` times exp(c − h)."""
    root: Float[Tensor, "B H N"]
    """√w."""
    ridge: Float[Tensor, "B H"]
    logarithms: Logarithms | None = None
    """The factor of κ that `kernel`, `target` and `diagonal` lack, by its logarithm; None if they lack nothing."""
    weighted: bool = static_field(default=True)
    """False if every w is 1."""

    @property
    def diagonal(self) -> Float[Tensor, "B H N"]:
        """The diagonal that is added to the Gram matrix: the ridge, and 1 for keys of weight 0."""
        ridge = self.ridge.unsqueeze(-1)
        if self.logarithms is not None:
            ridge = ridge * (-2 * self.logarithms.half).exp()
        return torch.where(self.root > 0, ridge, 1.0)

    def gram_factor(self) -> Float[Tensor, "B H N N"]:
        """The Cholesky factor of the system."""
        gram = self.kernel(self.key, self.key)
        if self.weighted:
            gram = self.root.unsqueeze(-1) * gram * self.root.unsqueeze(-2)
        diagonal = gram.diagonal(dim1=-2, dim2=-1) + self.diagonal
        return cholesky(torch.diagonal_scatter(gram, diagonal, dim1=-2, dim2=-1), "Gram matrix")

    def features(self) -> Float[Tensor, "B H N F"] | None:
        """√w·φ(key), if the kernel has fewer features than there are keys; otherwise None."""
        features = self.kernel.features(self.key)
        if features is None or features.shape[-1] >= self.key.shape[-2]:
            return None
        return self.root.unsqueeze(-1) * features


def cholesky(matrix: Float[Tensor, "*lead n n"], what: str) -> Float[Tensor, "*lead n n"]:
    """The lower Cholesky factor of a matrix, which the error's message calls `what`.

    Raises:
        ValueError: the matrix is singular to rounding. If values cannot be read (compiled), its factor is NaN instead.
    """
    factor, status = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    size = matrix.shape[-1]
    if size == 0:
        return factor
    # A pivot's rounding grows as that of a sum of `size` terms, and is relative to the diagonal entry of its row: factors of
    # a matrix whose rows have different units are as exact as those of the matrix with a diagonal of ones.
    rounding = 4 * torch.sym_sqrt(size) * torch.finfo(matrix.dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
    is_singular = (status != 0) | ~(pivots > rounding).all(-1)
    if not values_are_readable(matrix):
        return torch.where(is_singular[..., None, None], torch.nan, factor)
    if any_true(is_singular):
        heads = unwrapped(is_singular)
        raise ValueError(
            f"the {what} plus its ridge is singular to rounding in {matrix.dtype} (for {int(heads.sum())} of "
            f"{heads.numel()} heads): a larger ridge is needed, or float64"
        )
    return factor


def check_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    ridge: Ridge | None,
    operator_ridge: Ridge | None,
    log_weight: Tensor | None,
    is_causal: bool = False,
) -> tuple[AttentionProblem, KeyValuePairs]:
    """Check every argument, and convert them to the common layout.

    Raises:
        TypeError, ValueError: as `conditional_mean_attention` says.
    """
    instance("kernel", kernel, Kernel, "a massieu.regression.Kernel")
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
    if operator_ridge is None:
        matrix_ridge = _ridge_by_head("ridge", ridge, root)
    else:
        # λ = L times the operator's ridge, with L the sum of the keys' weights.
        total_weight = root.square().sum(-1)
        matrix_ridge = _ridge_by_head("operator_ridge", operator_ridge, root)
        matrix_ridge = matrix_ridge * torch.where(total_weight > 0, total_weight, 1.0)
    key = key.to(dtype)
    value = value.to(dtype)
    if log_weight is not None:
        # Hidden keys may hold anything, NaN too: they are replaced before anything is computed from them.
        is_visible = (root > 0).unsqueeze(-1)
        key = torch.where(is_visible, key, _visible_key(key, root))
        value = torch.where(is_visible, value, 0.0)
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if not all_true(tensor.isfinite()):
            raise ValueError(f"{name} must be finite where a key is visible, got NaN or infinite numbers")
    target = root.unsqueeze(-1) * value
    weighted = problem.log_weight is not None
    if not isinstance(kernel, ExponentialKernel):
        return problem, KeyValuePairs(kernel, key, target, root, matrix_ridge, weighted=weighted)
    logarithms = Logarithms.of(kernel, key)
    target = target * (-logarithms.relative).exp().unsqueeze(-1)
    return problem, KeyValuePairs(kernel.normalized(key), key, target, root, matrix_ridge, logarithms, weighted)


def _visible_key(key: Tensor, root: Tensor) -> Float[Tensor, "B H 1 D"]:
    """The first visible key of each head, or 0 without one. It needs no derivative, since it is multiplied by √w = 0."""
    if not key.shape[2]:
        return key.new_zeros(*key.shape[:2], 1, key.shape[3])
    first = (root > 0).to(torch.uint8).argmax(-1)[..., None, None]
    first_key = key.detach().gather(2, first.expand(*first.shape[:3], key.shape[3]))
    return torch.where((root > 0).any(-1)[..., None, None], first_key, 0.0)


def _root(
    log_weight: Tensor | None, shape: tuple[int, ...], query: Tensor, dtype: torch.dtype, relative: bool
) -> Tensor:
    """√w for each key, shape (B, H, N); if `relative`, in units of the largest, for ridges that see only ratios of weights."""
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
    if not all_true(weight < torch.inf):
        raise ValueError("log_weight must be below +inf and not NaN")
    weight = weight.to(dtype)
    if relative and shape[-1]:
        largest = weight.detach().amax(-1, keepdim=True)
        weight = weight - torch.where(largest > -torch.inf, largest, 0.0)
    root = (0.5 * weight).exp()
    if not all_true(root.square() < torch.inf):
        raise ValueError(f"log_weight must have finite weights in {dtype}, got {unwrapped(weight).max().item():g}")
    return root


def _ridge_by_head(name: str, value: Ridge | None, like: Tensor) -> Float[Tensor, "B H"]:
    """The ridge of each item and key head, from one number, one a key head, or one for each."""
    check_one_device(key=like, **{name: value})
    ridge = as_tensor(name, value, like)
    batch, heads = like.shape[:2]
    check_range(name, ridge, least=0)
    if tuple(ridge.shape) not in ((), (1,), (heads,), (batch, heads)):
        raise ValueError(
            f"{name} must be one number, {heads} (one a key head) or of shape {(batch, heads)}, got {tuple(ridge.shape)}"
        )
    return ridge.expand(batch, heads)


def need_positive(ridge: Float[Tensor, "B H"], what: str) -> None:
    """Raise a ValueError for a ridge of 0, which `what` cannot use."""
    if not all_true(ridge > 0):
        raise ValueError(f"{what} needs a positive ridge, got {unwrapped(ridge).min().item()}")
