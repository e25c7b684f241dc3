"""Whether a fixed point attracts: the largest eigenvalues of its Jacobian."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import whole_number
from massieu.foundation.doors import door, function
from massieu.foundation.transforms import repeat
from massieu.solve.linear import krylov, orthogonalise
from massieu.solve.methods import slope
from massieu.solve.problem import BoundFunction, pose

PRODUCTS = 12
"""Products with the Jacobian: as many extreme eigenvalues are near convergence by then as decide."""


class Spectrum(NamedTuple):
    """Ritz values of Jacobians; the eigenvalues themselves where there are products enough."""

    radius: Tensor  # the largest |θ|
    proven: Tensor  # the largest |θ| − (how far θ is from an eigenvalue of a normal matrix, at most)


class _Arnoldi(NamedTuple):
    basis: Tensor  # (*items, products + 1, n), rows orthonormal or zero
    hessenberg: Tensor  # (*items, products + 1, products)
    turn: Tensor  # which column is next


@door(function=function)
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
        TypeError: `value` is no floating-point tensor, `parameters` no tuple, or `products` no whole number.
        ValueError: `item_dims` is not among the value's dimensions, `products` is below 1, or `function` changes shape
            or dtype.

    Example:
        >>> import torch
        >>> from massieu.solve import spectral_radius
        >>> round(spectral_radius(lambda z: 3 * torch.tanh(z), torch.zeros(1)).item(), 2)  # 0 repels
        3.0
    """
    whole_number("products", products, least=1)
    problem, flat, leaves = pose(function, value, parameters, item_dims)
    with torch.no_grad():
        point = flat.detach()
        evaluate = BoundFunction(problem, tuple(leaf.detach() for leaf in leaves))
        return spectrum(evaluate, point, problem(point, *evaluate.leaves), products).radius


def spectrum(evaluate: BoundFunction, point: Tensor, image: Tensor, products: int, damping: float = 1.0) -> Spectrum:
    """Of z + damping·(f(z) − z), by `products` evaluations, or as many as an item has numbers."""
    if point.shape[-1] == 0:
        # Of an item without numbers the Jacobian has no eigenvalue.
        nothing = point.new_zeros(point.shape[:-1])
        return Spectrum(nothing, nothing)
    products = min(products, point.shape[-1])
    places = torch.arange(1, point.shape[-1] + 1, dtype=point.dtype, device=point.device)
    # As good as random, and the same everywhere: k² radians modulo 2π are equidistributed (Weyl 1916).
    first = torch.cos(places.square()).expand_as(point)
    basis = krylov(first, products + 1)
    columns = torch.zeros_like(basis[..., 0]).unsqueeze(-1).expand(*basis.shape[:-1], products)
    state = _Arnoldi(basis, columns, torch.zeros((), dtype=torch.int64, device=point.device))

    def step(state: _Arnoldi, point: Tensor, image: Tensor, *leaves: Tensor) -> _Arnoldi:
        places = torch.arange(products + 1, device=point.device)
        here, after = places == state.turn, places == state.turn + 1
        product = slope(BoundFunction(evaluate.problem, leaves), point, image, here.to(point.dtype) @ state.basis)
        vector, column, length = orthogonalise(state.basis, product)
        column = column + length.unsqueeze(-1) * after.to(point.dtype)
        basis = torch.where(after.unsqueeze(-1), vector.unsqueeze(-2), state.basis)
        columns = torch.where(here[:-1], column.unsqueeze(-1), state.hessenberg)
        return _Arnoldi(basis, columns, state.turn + 1)

    end = repeat(step, state, lambda state: state.turn < products, products, (point, image, *evaluate.leaves))
    hessenberg = end.hessenberg
    square = hessenberg[..., :-1, :]
    finite = square.isfinite().flatten(-2).all(-1)
    values, vectors = torch.linalg.eig(torch.where(finite[..., None, None], square, 0.0))
    # The next vector's share in the image of a Ritz vector is what that misses of being an eigenvector.
    missed = hessenberg[..., -1, -1, None].abs() * vectors[..., -1, :].abs() / vectors.abs().square().sum(-2).sqrt()
    sizes = (1 - damping + damping * values).abs()
    radii = sizes.amax(-1), (sizes - damping * missed).amax(-1)
    return Spectrum(*(torch.where(finite, radius, torch.nan) for radius in radii))
