"""Whether a fixed point attracts: the largest eigenvalues of its Jacobian."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.solve.linear import orthogonalise
from massieu.solve.methods import slope
from massieu.solve.problem import Map, pose

PRODUCTS = 12
"""Products with the Jacobian: as many extreme eigenvalues are near convergence by then as decide."""


class Spectrum(NamedTuple):
    """Ritz values of Jacobians; the eigenvalues themselves where there are products enough."""

    radius: Tensor  # the largest |θ|
    proven: Tensor  # the largest |θ| − (how far θ is from an eigenvalue of a normal matrix, at most)


def spectral_radius(
    function: Callable[..., Tensor],
    value: Float[Tensor, "*items_item"],
    parameters: tuple[Any, ...] = (),
    *,
    item_dims: int = 1,
    products: int = PRODUCTS,
) -> Float[Tensor, "*items"]:
    """The spectral radius of ∂function/∂z at `value`, each item by itself: below 1, plain iteration converges nearby.

    By Arnoldi's method from a fixed vector, with differences of `function` for products: exact to about √eps where an item
    has no more than `products` numbers, else an estimate, from below where the Jacobian is symmetric.

    Args:
        function: As for `fixed_point`.
        value: Where; as a rule a fixed point.
        parameters: As for `fixed_point`.
        item_dims: As for `fixed_point`.
        products: One evaluation each.

    Raises:
        TypeError: `value` is no floating-point tensor, or `parameters` no tuple.
        ValueError: `item_dims` is not among the value's dimensions, or `function` changes shape or dtype.
    """
    problem, flat, leaves = pose(function, value, parameters, item_dims)
    with torch.no_grad():
        point = flat.detach()
        evaluate = Map(problem, tuple(leaf.detach() for leaf in leaves))
        return spectrum(evaluate, point, evaluate(point), products).radius


def spectrum(evaluate: Map, point: Tensor, image: Tensor, products: int) -> Spectrum:
    """Ritz values by `products` evaluations, or as many as an item has numbers."""
    products = min(products, point.shape[-1])
    places = torch.arange(1, point.shape[-1] + 1, dtype=point.dtype, device=point.device)
    # As good as random, and the same everywhere: k² radians modulo 2π are equidistributed (Weyl 1916).
    first = torch.cos(places.square()).expand_as(point)
    basis = (first / first.norm(dim=-1, keepdim=True)).unsqueeze(-2)
    columns: list[Tensor] = []
    for turn in range(products):
        vector, column, length = orthogonalise(basis, slope(evaluate, point, image, basis[..., -1, :]))
        column = torch.cat([column, length.unsqueeze(-1)], -1)
        columns.append(torch.nn.functional.pad(column, (0, products - turn - 1)))
        basis = torch.cat([basis, vector.unsqueeze(-2)], -2)
    hessenberg = torch.stack(columns, -1)
    square = hessenberg[..., :-1, :]
    finite = square.isfinite().flatten(-2).all(-1)
    values, vectors = torch.linalg.eig(torch.where(finite[..., None, None], square, 0.0))
    # The next vector's share in the image of a Ritz vector is what that misses of being an eigenvector.
    missed = hessenberg[..., -1, -1, None].abs() * vectors[..., -1, :].abs() / vectors.abs().square().sum(-2).sqrt()
    sizes = values.abs()
    return Spectrum(*(torch.where(finite, size.amax(-1), torch.nan) for size in (sizes, sizes - missed)))
