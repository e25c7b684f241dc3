"""Implicit layers: any block iterated to its fixed point, and a block that has exactly one, whatever its weights."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.foundation.arguments import choice, described, floating, instance, number, whole_number
from massieu.foundation.transforms import in_functorch, values_are_readable, without_autocast
from massieu.nn.modules import Device, Iterating, Resettable, check_input, settings
from massieu.solve import Implicit, Method, OneStep, Unrolled, fixed_point
from massieu.solve.methods import AS_IT_PAYS
from massieu.solve.status import FixedPointResult

Injection = Literal["argument", "sum"]
Adjoint = Implicit | OneStep | Unrolled


class Equilibrium(Iterating, Resettable):
    """A block as an implicit layer: z = block(z, x), or z = block(z + x), solved for each item of the batch (B12).

    A stack of infinitely many copies of the block that all see the input x, as a deep equilibrium model has it (Bai,
    Kolter and Koltun, 2019). Gradients of the input and of the block's parameters are those of the implicit function
    theorem: memory does not grow with the number of steps. `convergence` tells of each item of the last call.

    Nothing makes a block contract: take `MonotoneEquilibrium`, or bound its weights by `SigmaReparametrization`. In
    training all steps of a call share one draw of the random numbers, so that dropout leaves a fixed point; `torch.func`
    and compiled code do not have that, and need dropout 0. Items must not act on each other, as they do in BatchNorm.

    Example:
        >>> import torch
        >>> from massieu.nn import Equilibrium
        >>> block = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(block.weight, 0.5)
        >>> layer = Equilibrium(block)  # z = (z + x)/2
        >>> round(layer(torch.tensor([[3.0]])).item(), 4)
        3.0
    """

    block: nn.Module

    def __init__(
        self,
        block: nn.Module,
        *,
        injection: Injection | None = None,
        item_dims: int | None = None,
        method: Method = AS_IT_PAYS,
        adjoint: Adjoint | None = None,
        max_steps: int = 200,
        rtol: float | None = None,
        atol: float | None = None,
        throw: bool = False,
    ) -> None:
        """Takes the block, and how fixed points are found.

        Args:
            block: A module that returns a tensor of its first argument's shape.
            injection: "argument": the block is called as block(z, x, …). "sum": it is called as block(z + x, …), which serves
                modules of one tensor, such as `torch.nn.TransformerEncoderLayer`. None: "argument" if the block's
                forward requires two arguments or more, else "sum".
            item_dims: How many of the last dimensions of z are one item. None: all but the first, which is the batch.
            method, max_steps, rtol, atol: As for `massieu.solve.fixed_point`. Where no fixed point is found the last state is
                used.
            adjoint: Where gradients come from; None: `Implicit`, with gradient 0 for an item that diverged.
            throw: Raise a ConvergenceError instead, with the residual and what to try.

        Raises:
            TypeError, ValueError: an argument of a wrong kind or out of its range.
        """
        super().__init__()
        self.block = instance("block", block, nn.Module, "a torch.nn.Module")
        if injection is None:
            injection = "argument" if _num_required(block) > 1 else "sum"
        self.injection = choice("injection", injection, "argument", "sum")
        self.item_dims = None if item_dims is None else whole_number("item_dims", item_dims, least=0)
        self.method = instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
        if adjoint is None:
            adjoint = Implicit(lost="nan" if throw else "zero")
        if not isinstance(adjoint, Adjoint):
            raise TypeError(f"adjoint must be Implicit(), OneStep() or Unrolled(), got {described(adjoint)}")
        self.adjoint = adjoint
        self.max_steps = max_steps
        self.rtol = rtol
        self.atol = atol
        self.throw = throw

    def forward(
        self,
        inputs: Float[Tensor, "B *item"],
        *extra: Any,
        start: Float[Tensor, "B *state"] | None = None,
        **options: Any,
    ) -> Float[Tensor, "B *state"]:
        """The fixed point for each item, in the dtype of `inputs`; arguments and errors as those of `solve`."""
        result = self.solve(inputs, *extra, start=start, **options)
        self._keep(result.status, result.residual)
        return result.value.to(inputs.dtype)

    def solve(
        self,
        inputs: Float[Tensor, "B *item"],
        *extra: Any,
        start: Float[Tensor, "B *state"] | None = None,
        **options: Any,
    ) -> FixedPointResult:
        """The fixed points with status, steps and residual of each, in at least float32.

        Args:
            inputs: x.
            extra, options: Further arguments of the block, such as a mask. Tensors among them have gradients.
            start: Where the iteration begins, of the state's shape; None: zeros of the shape of `inputs`. It has a gradient
                with `Unrolled` only.

        Raises:
            ConvergenceError: with `throw`, an item has no fixed point.
            TypeError, ValueError: an input of another dtype or device than the block's; a block that returns no tensor of
                z's shape, or that mixes items by BatchNorm.
        """
        check_input("inputs", inputs, self)
        for name, part in self.block.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
                raise ValueError(
                    f"items must not act on each other, but {name or 'the block'} is a {type(part).__name__} in training; "
                    "take LayerNorm or GroupNorm"
                )
        start = torch.zeros_like(inputs) if start is None else floating("start", start)
        tensors = dict(self.block.named_parameters())
        tensors |= {name: one for name, one in self.block.named_buffers() if one.is_floating_point()}
        seed = self._seed(inputs)

        def step(state: Tensor, tensors: Mapping[str, Tensor], inputs: Tensor, extra: Any, options: Any) -> Tensor:
            arguments = (state, inputs) if self.injection == "argument" else (state + inputs,)
            with _random_numbers(seed, state.device):
                return torch.func.functional_call(self.block, dict(tensors), (*arguments, *extra), options)

        item_dims = max(start.ndim - 1, min(start.ndim, 1)) if self.item_dims is None else self.item_dims
        with without_autocast(inputs.device):
            return fixed_point(
                step,
                start,
                (tensors, inputs, extra, options),
                method=self.method,
                adjoint=self.adjoint,
                item_dims=item_dims,
                max_steps=self.max_steps,
                rtol=self.rtol,
                atol=self.atol,
                throw=self.throw,
            )

    def _seed(self, inputs: Tensor) -> int | None:
        """The seed of all random numbers that the block draws in this call; None if it is left alone."""
        if not self.training or in_functorch() or not values_are_readable(inputs):
            return None
        return int(torch.randint(2**62, (), device="cpu"))

    def extra_repr(self) -> str:
        return settings(self, "injection", "item_dims", "method", "max_steps")


def _num_required(block: nn.Module) -> int:
    """How many positional arguments the block's forward requires."""
    parameters = inspect.signature(block.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters)


@contextmanager
def _random_numbers(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers from that seed within, and afterwards those that there would have been."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class MonotoneEquilibrium(Iterating, Resettable):
    """The layer z = relu(W z + U x + b) whose W keeps its fixed point unique and reachable, whatever the weights are.

    W = (1 − m)·I − AᵀA + B − Bᵀ with m > 0, so that I − W is strongly monotone: v·(I − W)v ≥ m‖v‖² (Winston and Kolter,
    2020). Every W with that property has this form. It may be large: relu(W·) need not be a contraction.

    What is iterated is Peaceman–Rachford splitting with the step 1/L, L = ‖I − W‖₂. Its state u, of which relu(u) is z,
    moves by a contraction of constant √(1 − m/L), `rate`. Plain iteration (`Picard()`) thus takes at most
    log(tolerance)/log(rate) steps; the default takes fewer. Gradients are those of the implicit function theorem.

    Example:
        >>> import torch
        >>> from massieu.nn import MonotoneEquilibrium
        >>> layer = MonotoneEquilibrium(2, 3)
        >>> x = torch.tensor([[1.0, -2.0]])
        >>> z = layer(x)
        >>> again = torch.relu(z @ layer.weight.mT + x @ layer.input_weight.mT + layer.bias)
        >>> torch.allclose(z, again, atol=1e-5)
        True
    """

    input_weight: nn.Parameter
    bias: nn.Parameter
    symmetric_factor: nn.Parameter
    skew_factor: nn.Parameter

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        monotonicity: float = 1.0,
        method: Method = AS_IT_PAYS,
        max_steps: int = 1000,
        throw: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draws U, A and B uniformly within 1/√(their columns), as `torch.nn.Linear` does; b starts as U's biases would.

        Args:
            monotonicity: m, positive. Nearer to 0 more maps can be reached, and iteration gets slower.
            method, max_steps, throw: As for `ImplicitHeads`.

        Raises:
            TypeError, ValueError: an argument of a wrong kind or out of its range.
        """
        super().__init__()
        self.input_size = whole_number("input_size", input_size, least=1)
        self.hidden_size = whole_number("hidden_size", hidden_size, least=1)
        self.monotonicity = number("monotonicity", monotonicity, above=0)
        self.method = instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
        self.max_steps = max_steps
        self.throw = throw
        shapes = {
            "input_weight": (hidden_size, input_size),
            "bias": (hidden_size,),
            "symmetric_factor": (hidden_size, hidden_size),
            "skew_factor": (hidden_size, hidden_size),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        for weight in (self.input_weight, self.symmetric_factor, self.skew_factor):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        nn.init.uniform_(self.bias, -(self.input_size**-0.5), self.input_size**-0.5)

    @property
    def weight(self) -> Float[Tensor, "H H"]:
        """W."""
        eye = torch.eye(self.hidden_size, dtype=self.bias.dtype, device=self.bias.device)
        return eye - self._operator(eye)

    @property
    def rate(self) -> Float[Tensor, ""]:
        """√(1 − m/L): by this factor or a smaller one the distance to the fixed point falls in each plain step."""
        with torch.no_grad(), without_autocast(self.bias.device):
            return (1 - self.monotonicity * self._step_size()).sqrt()

    def forward(self, inputs: Float[Tensor, "*items X"]) -> Float[Tensor, "*items H"]:
        """The fixed point z for each item. Raises as `solve`."""
        result = self.solve(inputs)
        self._keep(result.status, result.residual)
        return result.value.to(inputs.dtype)

    def solve(self, inputs: Float[Tensor, "*items X"]) -> FixedPointResult:
        """The fixed points z, in at least float32; steps and residual are those of the iteration's state u.

        The distance of u to its fixed point, and with it that of z, is at most residual/(1 − `rate`).

        Raises:
            ConvergenceError: with `throw`, the steps did not suffice.
            TypeError, ValueError: inputs of another size, dtype or device than the module's.
        """
        check_input("inputs", inputs, self, self.input_size)
        with without_autocast(inputs.device):
            dtype = torch.promote_types(inputs.dtype, torch.float32)
            eye = torch.eye(self.hidden_size, dtype=dtype, device=inputs.device)
            step_size = self._step_size()
            # V = (I + (I − W)/L)⁻¹ exists at every step size, since I − W is monotone.
            resolvent = torch.linalg.inv(eye + step_size * self._operator(eye))
            field = inputs.to(dtype) @ self.input_weight.to(dtype).mT + self.bias.to(dtype)
            drift = step_size * field @ resolvent.mT
            result = fixed_point(
                _peaceman_rachford,
                torch.zeros_like(drift),
                (drift, resolvent),
                method=self.method,
                # The step is a contraction, so that no fixed point can be a saddle.
                adjoint=Implicit(lost="nan" if self.throw else "zero", check_attraction=False),
                max_steps=self.max_steps,
                throw=self.throw,
            )
        return result._replace(value=torch.relu(result.value))

    def _operator(self, eye: Float[Tensor, "H H"]) -> Float[Tensor, "H H"]:
        """I − W = m·I + AᵀA − B + Bᵀ, in the dtype of `eye`."""
        symmetric = self.symmetric_factor.to(eye)
        skew = self.skew_factor.to(eye)
        return self.monotonicity * eye + symmetric.mT @ symmetric - skew + skew.mT

    @torch.no_grad()
    def _step_size(self) -> Float[Tensor, ""]:
        """1/L, without gradient: no fixed point depends on it."""
        dtype = torch.promote_types(self.bias.dtype, torch.float32)
        eye = torch.eye(self.hidden_size, dtype=dtype, device=self.bias.device)
        return 1 / torch.linalg.matrix_norm(self._operator(eye), 2)

    def extra_repr(self) -> str:
        return settings(self, "input_size", "hidden_size", "monotonicity", "method", "max_steps")


def _peaceman_rachford(state: Tensor, drift: Tensor, resolvent: Tensor) -> Tensor:
    """One step of Peaceman–Rachford splitting: the reflections of relu and of the affine operator, one after the other.

    Where it stands still, relu(u) = V(2·relu(u) − u + α(Ux + b)), which is z = relu(z − α((I − W)z − Ux − b)).
    """
    reflected = 2 * torch.relu(state) - state
    return 2 * (reflected @ resolvent.mT + drift) - reflected
