"""The laws of kernels: `kernel_checks`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.regression import Kernel, conditional_mean_attention
from massieu.solve import ConjugateGradients
from massieu.testing.checks import Checks, Law, check_case
from massieu.testing.everywhere import EVERYWHERE, SuiteCase, Trial, checks_with_exemptions, without

_RIDGE = 0.7


@dataclass(frozen=True, eq=False)
class KernelCase(SuiteCase):
    """A kernel, and points to check it at.

    Attributes:
        kernel: Its parameters are single numbers, or one for each head of the points.
        points: At least two for each head, at which the kernel is neither huge nor tiny; B counts the queries.
        oracle: κ of two points (D,) as a number, by an independent computation.
        exempt, compile_backend: Laws that are not promised, each with the reason; the backend of "compiled".

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel
        >>> from massieu.testing import KernelCase, kernel_checks
        >>> case = KernelCase(LinearKernel.create(), torch.eye(3).reshape(1, 1, 3, 3), oracle=lambda a, b: a @ b)
        >>> kernel_checks(case)["pairs"]()
    """

    kernel: Kernel
    points: Float[Tensor, "B H N D"]
    oracle: Callable[[Tensor, Tensor], float | Tensor] | None = None


def kernel_checks(case: KernelCase) -> Checks:
    """Named checks of a kernel: symmetry, positive definiteness, features, derivatives.

    * pairs: κ of all pairs against the oracle; symmetric; pair by pair: other keys do not matter; positive: no eigenvalue
      of a Gram matrix is negative;
    * diagonal; features: φ(a)·φ(b) is κ(a, b); logarithms: `log` and `log_diagonal` of kernels that have them;
    * heads: a kernel with one parameter for each head equals the kernels of the single heads;
    * conditional mean: products with the Gram matrix alone lead to the same result as its inverse;
    * and structure, one by one, vmap, derivatives, precision, no query, meta, not a number, compiled.

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel
        >>> from massieu.testing import KernelCase, kernel_checks
        >>> checks = kernel_checks(KernelCase(LinearKernel.create(), torch.eye(3).reshape(1, 1, 3, 3)))
        >>> checks["symmetric"]()
        >>> checks.left_out["pairs"]
        'no `oracle` is given'
    """
    check_case(case, KernelCase, Kernel)
    return checks_with_exemptions(case, _trial, _LAWS)


def _trial(case: KernelCase) -> Trial[KernelCase]:
    functions = {
        "pairs": lambda kernel, points: kernel(points, points.roll(1, -2)[..., 1:, :]),
        "diagonal": lambda kernel, points: kernel.diagonal(points),
    }
    return Trial(case, case.kernel.to(torch.float64), case.points.double(), functions, 3)


def _pairs(trial: Trial[KernelCase]) -> None:
    oracle = trial.case.oracle
    points = trial.points
    assert oracle is not None
    lead = points.shape[:-2]
    count = points.shape[-2]
    values = [float(oracle(a, b)) for one in points.flatten(0, -3) for a in one for b in one]
    expected = torch.tensor(values, dtype=torch.float64).reshape(*lead, count, count)
    trial.same("pairs = oracle", trial.value(points, points), expected)


def _symmetric(trial: Trial[KernelCase]) -> None:
    points = trial.points
    gram = trial.value(points, points)
    trial.same("symmetric: κ(a, b) = κ(b, a)", gram, gram.mT)


def _pair_by_pair(trial: Trial[KernelCase]) -> None:
    kernel = trial.value
    points = trial.points
    alone = torch.cat([kernel(points, points[..., n : n + 1, :]) for n in range(points.shape[-2])], -1)
    trial.same("pair by pair: κ(a, b) of one key alone = beside others", alone, kernel(points, points))


def _positive(trial: Trial[KernelCase]) -> None:
    points = trial.points
    # One point twice makes the Gram matrix singular.
    points = torch.cat([points, points[..., :1, :]], -2)
    gram = trial.value(points, points)
    smallest = torch.linalg.eigvalsh(gram + gram.mT)[..., 0] / 2
    size = gram.abs().amax((-2, -1))
    trial.at_most(
        "positive: the least eigenvalue is not negative", -smallest.amin(-1), 0 * size.amax(-1), 1e-10 * size.amax(-1)
    )


def _diagonal(trial: Trial[KernelCase]) -> None:
    points = trial.points
    expected = trial.value(points, points).diagonal(dim1=-2, dim2=-1)
    trial.same("diagonal: κ(x, x)", trial.value.diagonal(points), expected)


def _features(trial: Trial[KernelCase]) -> None:
    points = trial.points
    features = trial.value.features(points)
    trial.same("features: φ(a)·φ(b) = κ(a, b)", features @ features.mT, trial.value(points, points))


def _logarithms(trial: Trial[KernelCase]) -> None:
    kernel = trial.value
    points = trial.points
    trial.same("logarithms: of κ(a, b)", kernel.log(points, points), kernel(points, points).log())
    trial.same("logarithms: of κ(x, x)", kernel.log_diagonal(points), kernel.diagonal(points).log())


def _heads(trial: Trial[KernelCase]) -> None:
    kernel = trial.value
    points = trial.points
    heads = points.shape[1]
    factors = torch.linspace(0.5, 1.5, heads, dtype=torch.float64, device=points.device)
    many = pytree.tree_map(lambda leaf: leaf * factors, kernel)
    parts = [pytree.tree_map(lambda leaf, h=h: leaf[h], many) for h in range(heads)]
    alone = [one(*[points[:, h : h + 1]] * 2) for h, one in enumerate(parts)]
    trial.same("heads: one number a head", many(points, points), torch.cat(alone, 1))


def _conditional_mean(trial: Trial[KernelCase]) -> None:
    kernel = trial.value
    points = trial.points
    value = trial.drawn(points[..., :1])
    gram = kernel(points, points)
    identity = torch.eye(points.shape[-2], dtype=gram.dtype, device=gram.device)
    expected = gram @ torch.linalg.solve(gram + _RIDGE * identity, value)
    # Products with the Gram matrix alone are for kernels without finitely many features.
    iterated = [ConjugateGradients(rtol=1e-12)] if kernel.features(points) is None else []
    for method in (None, *iterated):
        result = conditional_mean_attention(points, points, value, kernel=kernel, ridge=_RIDGE, method=method)
        trial.same("conditional mean: K(K + ridge)⁻¹v", result.output, expected, 1e-7)


def _missing_features(case: KernelCase) -> str | None:
    return "there are none of finitely many numbers" if case.kernel.features(case.points) is None else None


def _missing_logarithms(case: KernelCase) -> str | None:
    return None if hasattr(case.kernel, "log") else "it has no `log`"


def _missing_heads(case: KernelCase) -> str | None:
    return None if case.kernel._tensors() else "it has no numbers"


_LAWS: tuple[Law[Any, Any], ...] = (
    Law("pairs", _pairs, without("oracle")),
    Law("symmetric", _symmetric),
    Law("pair by pair", _pair_by_pair),
    Law("positive", _positive),
    Law("diagonal", _diagonal),
    Law("features", _features, _missing_features),
    Law("logarithms", _logarithms, _missing_logarithms),
    Law("heads", _heads, _missing_heads),
    Law("conditional mean", _conditional_mean),
    *[law for name, law in EVERYWHERE.items() if name != "half precision"],
)
