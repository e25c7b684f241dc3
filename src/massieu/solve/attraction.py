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
from massieu.solve.methods import jacobian_product
from massieu.solve.problem import BoundFunction, pose

PRODUCTS = 12
"""Products with the Jacobian; by then the eigenvalues that decide, those of the largest modulus, are near convergence."""


class Spectrum(NamedTuple):
    """The largest moduli among the Ritz values θ of Jacobians, one number for each item.

    With as many products as an item has numbers, Ritz values are the eigenvalues.
    """

    radius: Tensor  # the largest |θ|
    proven: Tensor  # the largest |θ| − (how far θ is from an eigenvalue of a normal matrix, at most)


class _Arnoldi(NamedTuple):
    """A Krylov basis Q in the making, and the Jacobian J in it: J Q = Q H but for the last row of H."""

    basis: Tensor  # (*items, products + 1, n), rows orthonormal or zero
    hessenberg: Tensor  # H, (*items, products + 1, products)
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
    """The spectrum of the damped map z + damping·(f(z) − z) at `point`, whose f is `image`.

    It takes `products` evaluations, or as many as an item has numbers.
    """
    size = point.shape[-1]
    if size == 0:
        # The Jacobian of an item without numbers has no eigenvalue.
        zero = point.new_zeros(point.shape[:-1])
        return Spectrum(zero, zero)
    products = min(products, size)

    def step(state: _Arnoldi, point: Tensor, image: Tensor, *leaves: Tensor) -> _Arnoldi:
        return _arnoldi_step(BoundFunction(evaluate.problem, leaves), state, point, image)

    begun = _arnoldi_start(point, products)
    end = repeat(step, begun, lambda state: state.turn < products, products, (point, image, *evaluate.leaves))
    square = end.hessenberg[..., :-1, :]
    finite = square.isfinite().flatten(-2).all(-1)
    ritz_values, vectors = torch.linalg.eig(torch.where(finite[..., None, None], square, 0.0))
    # J applied to a Ritz vector leaves the Krylov space along the next basis vector alone. The length of that part, for a unit
    # Ritz vector, bounds its distance from an eigenvalue of a normal matrix.
    last_entry = end.hessenberg[..., -1, -1, None].abs()
    residual = last_entry * vectors[..., -1, :].abs() / vectors.abs().square().sum(-2).sqrt()
    # An eigenvalue θ of J is 1 − γ + γθ of the damped map.
    moduli = (1 - damping + damping * ritz_values).abs()
    radius = moduli.amax(-1)
    proven = (moduli - damping * residual).amax(-1)
    return Spectrum(torch.where(finite, radius, torch.nan), torch.where(finite, proven, torch.nan))


def _arnoldi_start(point: Tensor, products: int) -> _Arnoldi:
    """The first basis vector, and zeros where the others and the columns of H will stand."""
    places = torch.arange(1, point.shape[-1] + 1, dtype=point.dtype, device=point.device)
    # As good as random, and the same everywhere: k² radians modulo 2π are equidistributed (Weyl 1916).
    first = torch.cos(places.square()).expand_as(point)
    basis = krylov(first, products + 1)
    columns = torch.zeros_like(basis[..., 0]).unsqueeze(-1).expand(*basis.shape[:-1], products)
    return _Arnoldi(basis, columns, torch.zeros((), dtype=torch.int64, device=point.device))


def _arnoldi_step(evaluate: BoundFunction, state: _Arnoldi, point: Tensor, image: Tensor) -> _Arnoldi:
    """One more basis vector, and one more column of H. Both are written by masks: a compiled loop knows no index."""
    places = torch.arange(state.basis.shape[-2], device=point.device)
    here = places == state.turn
    after = places == state.turn + 1
    current = here.to(point.dtype) @ state.basis
    product = jacobian_product(evaluate, point, image, current)
    vector, column, length = orthogonalise(state.basis, product)
    column = column + length.unsqueeze(-1) * after.to(point.dtype)
    return _Arnoldi(
        basis=torch.where(after.unsqueeze(-1), vector.unsqueeze(-2), state.basis),
        hessenberg=torch.where(here[:-1], column.unsqueeze(-1), state.hessenberg),
        turn=state.turn + 1,
    )
