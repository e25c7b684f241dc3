"""Groups for which some sampled windows are run again: in another order of their tokens, or with gradients."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import output_tensor, run
from massieu.probing.statistics.layer_groups import SublayerMeans, has_own_control
from massieu.probing.statistics.registry import AGAIN, RESPONSE, SYMMETRY, measures
from massieu.probing.statistics.response import DEEP, LOCAL, Response
from massieu.probing.statistics.symmetry import permutation_gap
from massieu.probing.statistics.windowed import HeadWindow
from massieu.probing.stream.replay import relative_difference, tolerance
from massieu.probing.stream.wiring import Step, StreamTracer
from massieu.probing.sums.units import Units

WINDOWS = {SYMMETRY: 16, RESPONSE: 8}
"""Of the sampled ones, how many are run again."""
FEWEST = 8
"""Tokens that can change their places, or that a token must see beside itself."""
ASKED = 2
"""Tokens of a window whose response is measured."""
LONGEST = 2048
"""A window longer than that has too large a matrix of weights."""
_ROWS = 64
_POSITIONS = "position_ids"
Sums = tuple[Float[Tensor, "statistics 2"], Float[Tensor, "statistics 2"]]
"""Totals and what they are divided by, of the model and of the control."""


class UnsuitableInputsError(Exception):
    """The question does not fit these inputs or this model, for the reason that it holds."""


class AgainStatistics(SublayerMeans):
    """Running means of one such group over its windows.

    Attributes:
        failed: why the last window that did not fit gave no numbers; None where all did.
    """

    def __init__(self, group: str, units: Units) -> None:
        super().__init__(group, units)
        self.failed: str | None = None

    def read(
        self,
        model: nn.Module,
        sites: Sequence[SiteInfo],
        inputs: dict[str, Any],
        number: int | None,
        drawn: torch.Generator,
    ) -> None:
        """Measure one window.

        Args:
            inputs: of this window alone, as the model is called with them.
            number: its place among the sampled ones.
            drawn: random numbers that belong to the window.
        """
        if number is not None and number >= WINDOWS[self.group]:
            return
        try:
            found = _MEASURED[self.group](model, sites, inputs, drawn)
        except UnsuitableInputsError as reason:
            self.failed = str(reason)
            return
        for index, (total, count) in found.items():
            self.add(index, total, count, number)


def begun(groups: frozenset[str], units: Units) -> dict[str, AgainStatistics]:
    """Those of the groups that were named."""
    return {group: AgainStatistics(group, units) for group in AGAIN if group in groups}


# Another order -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reordered:
    """A window whose tokens stand in another order.

    Attributes:
        inputs: with tokens moved.
        order: which token stands at each place of those that can be moved; they are the last ones of the stream.
        most_before: how many others may stand before them, such as one for the class.
    """

    inputs: dict[str, Any]
    order: Int[Tensor, " T"]
    most_before: int

    def back(self, states: Float[Tensor, "L D"], moved: bool) -> Float[Tensor, "T D"] | None:
        """The movable tokens' states in the first order; None where the stream has other tokens."""
        before = len(states) - len(self.order)
        if not 0 <= before <= self.most_before:
            return None
        return states[before:][self.order.argsort()] if moved else states[before:]


def permutation_gaps(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], drawn: torch.Generator
) -> dict[int, Sums]:
    """The statistics of `massieu.probing.statistics.symmetry` at every sublayer.

    Raises:
        UnsuitableInputsError: the tokens cannot be put in another order.
    """
    inputs = _real_alone(model, inputs)
    changed = _reordered_images(model, inputs, drawn) if "pixel_values" in inputs else _reordered_text(inputs, drawn)
    if len(changed.order) < FEWEST:
        return {}
    stock, states = _states(model, sites, inputs)
    others = [_states(model, sites, changed.inputs)[1]]
    positions = _positions(model, sites, inputs, stock) if "input_ids" in inputs else None
    if positions is not None:
        others.append(_states(model, sites, changed.inputs | {_POSITIONS: positions[:, changed.order]})[1])
    shift = int(torch.randint(1, len(changed.order), (), generator=drawn))
    apart = torch.arange(len(changed.order)).roll(shift)
    found: dict[int, Sums] = {}
    for index, own in states.items():
        total, count = torch.zeros(2, 1, 2, dtype=torch.float64)
        for which, other in enumerate(others):
            here, there = changed.back(own, moved=False), changed.back(other[index], moved=True)
            if here is not None and there is not None:
                total[0, which], count[0, which] = permutation_gap(here, there, apart.to(here.device))
        if bool((count > 0).any()):
            found[index] = total, count
    return found


def _real_alone(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """One text without its padding, and with a mask of ones: without one, numbers of positions may be read as documents."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "pixel_values" in inputs:
        return inputs
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        real = mask[0].bool()
        along = {k for k, v in inputs.items() if isinstance(v, Tensor) and v.shape == ids.shape}
        return {k: v[:, real] if k in along else v for k, v in inputs.items()}
    if mask is None and "attention_mask" in inspect.signature(model.forward).parameters:
        return inputs | {"attention_mask": torch.ones_like(ids)}
    return inputs


def _reordered_text(inputs: dict[str, Any], drawn: torch.Generator) -> Reordered:
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or any(name.startswith("decoder_") for name in inputs):
        raise UnsuitableInputsError("tokens change places where they are the ids of one text, or patches of an image")
    length = ids.shape[1]
    order = torch.arange(length)
    order[1:-1] = 1 + torch.randperm(max(length - 2, 0), generator=drawn)  # special tokens stay at both ends
    order = order.to(ids.device)
    return Reordered(inputs | {"input_ids": ids[:, order]}, order, 0)


def _reordered_images(model: nn.Module, inputs: dict[str, Any], drawn: torch.Generator) -> Reordered:
    pixels, config = inputs["pixel_values"], getattr(model, "config", None)
    size = getattr(getattr(config, "vision_config", config), "patch_size", None)
    if "input_ids" in inputs or not isinstance(pixels, Tensor) or pixels.dim() != 4 or not isinstance(size, int):
        raise UnsuitableInputsError(
            "patches are put in another order where a batch is of images alone, in square patches of one size"
        )
    rows, columns = (extent // size for extent in pixels.shape[-2:])
    order = torch.randperm(rows * columns, generator=drawn).to(pixels.device)
    whole = pixels[..., : rows * size, : columns * size]
    patches = whole.unflatten(3, (columns, size)).unflatten(2, (rows, size)).transpose(3, 4).flatten(2, 3)
    moved = patches[:, :, order].unflatten(2, (rows, columns)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    changed = pixels.clone()
    changed[..., : rows * size, : columns * size] = moved
    return Reordered(inputs | {"pixel_values": changed}, order, FEWEST)


def _states(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any]
) -> tuple[Tensor, dict[int, Float[Tensor, "L D"]]]:
    """The model's output, and the stream after each of its steps, in float64."""
    found: dict[int, Tensor] = {}

    def keep(step: Step) -> None:
        if step.after.dim() == 3 and step.after.shape[0] == 1:
            found[step.sublayer.index] = step.after[0].detach().double()

    with torch.no_grad(), _watching(model, sites, keep):
        return output_tensor(model, run(model, inputs)), found


@contextmanager
def _watching(model: nn.Module, sites: Sequence[SiteInfo], observer: Callable[[Step], None]) -> Iterator[None]:
    tracer = StreamTracer(model, list(sites), observer)
    with capturing(model, tracer.attention), tracer.watching():
        yield


def _positions(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], stock: Tensor
) -> Int[Tensor, "1 L"] | None:
    """The position numbers that the model gives by itself; None where it takes none, or they are not found.

    They are counted from 0, or from the padding's number on: what gives the model's own output is right.
    """
    if _POSITIONS in inputs:
        return inputs[_POSITIONS]
    if _POSITIONS not in inspect.signature(model.forward).parameters:
        return None
    ids = inputs["input_ids"]
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    for first in (0, *([] if padding is None else [int(padding) + 1])):
        numbers = torch.arange(ids.shape[1], device=ids.device)[None] + first
        try:
            output, _ = _states(model, sites, inputs | {_POSITIONS: numbers})
        except IndexError:  # more positions than there are vectors
            continue
        if relative_difference(output, stock) <= tolerance(stock.dtype):
            return numbers
    return None


# With gradients ----------------------------------------------------------------------------------------------------------


def responses(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], drawn: torch.Generator
) -> dict[int, Sums]:
    """The statistics of `massieu.probing.statistics.response` at every attention step of the stream.

    Raises:
        UnsuitableInputsError: no attention step was seen, or the window is too long.
    """
    inputs, steps = _real_alone(model, inputs), list[Step]()
    last: dict[bool, Tensor] = {}

    def keep(step: Step) -> None:
        if step.after.dim() != 3 or step.after.shape[0] != 1:
            return
        if step.after.shape[1] > LONGEST:
            raise UnsuitableInputsError(f"the response is measured on windows of at most {LONGEST:,} tokens")
        last[step.in_decoder] = step.after
        call = None if step.read is None else step.read.call
        if call is not None and step.sublayer.kind == "attention" and call.key.shape[2] == step.after.shape[1]:
            steps.append(step)

    with _differentiable(model), _watching(model, sites, keep):
        run(model, {k: v.detach().requires_grad_() if _continuous(v) else v for k, v in inputs.items()})
    if not steps:
        raise UnsuitableInputsError("no attention layer was seen that adds to a stream of the tokens that it reads")
    found: dict[int, Sums] = {}
    for in_decoder in {step.in_decoder for step in steps}:
        stack = [step for step in steps if step.in_decoder == in_decoder]
        found |= _stack_responses(stack, last[in_decoder], drawn)
    return found


def _continuous(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """With gradients, and every weight of the model as a leaf of them; none is given a gradient."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    before = [p.requires_grad for p in parameters]
    try:
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)


def _stack_responses(steps: Sequence[Step], last: Tensor, drawn: torch.Generator) -> dict[int, Sums]:
    """Of one stack of layers whose last state is ``last``."""
    steps = [step for step in steps if step.after.shape == last.shape]
    found: dict[int, Sums] = {}
    if not steps:
        return found
    able = ((_mean_weights(steps[-1]) > 0).sum(1) >= FEWEST).nonzero()[:, 0]
    asked = able[torch.randperm(len(able), generator=drawn)[:ASKED].to(able.device)].tolist()
    along = [torch.randn(last.shape[-1], generator=drawn).to(last) for _ in asked]
    streams = [step.before for step in steps]
    deep = [_gradients(last, token, line, streams) for token, line in zip(asked, along, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for place in range(len(steps) - 1, -1, -1):
        step, sums = steps[place], torch.zeros(2, len(measures(RESPONSE)), 2, dtype=torch.float64)
        coupling = _mean_weights(step)
        total = total.to(coupling.device) + coupling
        for token, line, whole in zip(asked, along, deep, strict=True):
            (local,) = _gradients(step.after - step.before, token, line, [step.before])
            _add(sums, LOCAL, _response(local, coupling, token), drawn)
            _add(sums, DEEP, _response(whole[place], total / (len(steps) - place), token), drawn)
        found[step.sublayer.index] = sums[0], sums[1]
    return found


def _gradients(
    output: Float[Tensor, "1 L D"], token: int, along: Float[Tensor, " D"], streams: Sequence[Float[Tensor, "1 L D"]]
) -> list[Float[Tensor, "L D"]]:
    """Of one token's output along a direction, with respect to states of the stream, in float64."""
    found = torch.autograd.grad((output[0, token] * along).sum(), list(streams), retain_graph=True)
    return [each[0].double() for each in found]


def _mean_weights(step: Step) -> Float[Tensor, "L L"]:
    """The heads' mean weights of every token on every other, without a diagonal, in float64."""
    assert step.read is not None
    call, length = step.read.call, step.after.shape[1]
    everything = torch.ones(length, dtype=torch.bool, device=call.key.device)
    parts = torch.arange(length, device=call.key.device).split(_ROWS)
    with torch.no_grad():
        rows = [HeadWindow(call, everything, part, 0).weights().mean(0).double() for part in parts]
    return torch.cat(rows).fill_diagonal_(0.0)


def _response(gradient: Float[Tensor, "L D"], coupling: Float[Tensor, "L L"], token: int) -> Response:
    strength, visible = gradient.norm(dim=-1), coupling[token] > 0
    within = torch.eye(len(coupling), dtype=torch.float64, device=coupling.device) - coupling
    unit = torch.eye(len(within)).to(within)[token]
    collective, trouble = torch.linalg.solve_ex(within.mT, unit)  # a row of the inverse
    if int(trouble):
        collective = torch.full_like(collective, torch.nan)
    return Response(strength[visible], strength[token], coupling[token][visible], collective[visible])


def _add(sums: Float[Tensor, "2 statistics 2"], prefix: str, own: Response, drawn: torch.Generator) -> None:
    """Add one token's numbers to those of a layer."""
    order = torch.randperm(len(own.others), generator=drawn).to(own.others.device)
    moved = Response(own.others, own.itself, own.weights[order], own.collective[order])
    if len(order) < FEWEST or not bool(own.collective.isfinite().all()):
        return
    for place, (name, measure) in enumerate(measures(RESPONSE).items()):
        if name.startswith(DEEP) == (prefix == DEEP):
            for which, compared in enumerate((own, moved)[: 1 + has_own_control(name)]):
                value = measure(own, compared)
                if bool(value.isfinite()):
                    sums[0, place, which] += value.cpu()
                    sums[1, place, which] += 1


_MEASURED: Mapping[str, Callable[..., dict[int, Sums]]] = {SYMMETRY: permutation_gaps, RESPONSE: responses}
