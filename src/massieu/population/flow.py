"""A cloud of tokens through layer after layer, with what is observed of it after each (S20, E1)."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from massieu.errors import InputError
from massieu.foundation import arguments
from massieu.foundation.arguments import described, flag, whole_number
from massieu.foundation.doors import any_of, door, sequence
from massieu.foundation.settings import fingerprint
from massieu.ops.sharded.agreement import Call, together
from massieu.ops.sharded.collectives import Peers
from massieu.population import flow_checkpoint
from massieu.population.cloud_shape import CloudShape
from massieu.population.flow_checkpoint import State
from massieu.population.flow_result import FlowResult, FlowRow
from massieu.population.observables import CloudMoments
from massieu.population.operator import Operator
from massieu.population.reading import Observable, ObservableReading, Processes, check_single_cloud, joined

Layer = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n e"]]


class Observed(Protocol):
    """What a layer that draws tells of its draws besides the particles."""

    @property
    def particles(self) -> Float[Tensor, "n d"]: ...
    @property
    def ancestors(self) -> Int[Tensor, "n"] | None: ...
    def readings(self) -> Mapping[str, ObservableReading]: ...


@runtime_checkable
class ObservedLayer(Protocol):
    """A layer that a flow asks for more than the particles, such as `ResampledLayer`."""

    def observed(self, particles: Float[Tensor, "n d"], /) -> Observed: ...


class Flow:
    """Moves tokens through operators ``particles (n, d) -> particles`` and records observables after each.

    Nothing is kept of a layer but what was observed, so that memory does not grow with depth; the observables of this package
    need memory linear in n·d.

    Args:
        layers: Operators, applied in their order; or one, applied `depth` times. They run without gradients.
        observables: Callables on a cloud that return names with numbers, vectors or `ObservableReading`s. None:
            `CloudMoments` and `CloudShape`, both of time linear in the tokens.
        depth: How often one operator is applied.
        generators: Sources of random numbers that layers draw from, so that a checkpoint can go on where they were; those that
            a layer has as its attribute `generator` are known. Draws from torch's global generator are not repeated.
        group: Processes that share the cloud, each with its own tokens. Of layers that have it, ``sharded(particles,
            group=group)`` is called; functions must be for that themselves. Observables are called with ``group=group``.

    Raises:
        TypeError: a layer, an observable, a generator or a depth of another type.
        ValueError: no layer; several layers and a depth, or one and none; a group, and an operator that needs all tokens.

    Example:
        >>> import torch
        >>> from massieu.population import CloudMoments, Flow
        >>> flow = Flow(lambda cloud: 0.5 * cloud, depth=2, observables=[CloudMoments()])
        >>> flow.run(torch.eye(2), progress=False).values("length").tolist()
        [1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        layers: Layer | Sequence[Layer],
        *,
        observables: Sequence[Observable] | None = None,
        depth: int | None = None,
        generators: Sequence[torch.Generator] = (),
        group: Processes = None,
    ) -> None:
        self.layers = _repeated(layers, depth)
        self.observables = (
            (CloudMoments(), CloudShape()) if observables is None else tuple(sequence("observables", observables))
        )
        for each in (*self.layers, *self.observables):
            if not callable(each):
                raise TypeError(f"layers and observables must be callable, got {type(each).__name__}")
        if group is not None:
            for layer in self.layers:
                if isinstance(layer, Operator):
                    layer.check_shared()
            any_of("a ProcessGroup or a DeviceMesh", ProcessGroup, DeviceMesh)("group", group)
        known = [getattr(layer, "generator", None) for layer in self.layers]
        found = [arguments.generator("each of generators", each) for each in sequence("generators", generators)]
        found += [each for each in known if isinstance(each, torch.Generator)]
        self.generators = list({id(each): each for each in found}.values())
        self.group = group

    @door(progress=flag)
    def run(
        self, particles: Float[Tensor, "n d"], *, checkpoint: str | Path | None = None, progress: bool = True
    ) -> FlowResult:
        """Take the particles through all layers. Ctrl-C ends it early: what there is until then is returned as incomplete.

        Args:
            particles: The cloud, of any floating dtype; layers get it as it is. Of a shared cloud this process's tokens.
            checkpoint: A folder to which the state is written after each layer, so that `resume` goes on bit for bit. A file
                is complete or not there; the one before is removed after it.
            progress: Show a bar on a terminal.

        Raises:
            InputError: the folder has a checkpoint already, or cannot be written to.
            TypeError, ValueError: no cloud; a layer that returns none, or one of other tokens; observables of one name.
        """
        folder = None if checkpoint is None else Path(checkpoint)
        group = joined(self.group)

        def check() -> dict[str, Any]:
            check_single_cloud(particles, "particles")
            if folder is not None and flow_checkpoint.exists(folder, group):
                raise InputError(f"{folder} has a checkpoint already: resume it, or name another folder")
            return self._settings() | _of_the_cloud(particles)

        settings = self._agreed(group, check, checkpoint is not None)
        with torch.no_grad():
            state = State(0, particles.detach(), tuple(self._observe(particles.detach(), 0, {})), None)
            if folder is not None:
                flow_checkpoint.write(folder, state, settings, self.generators, group)
        return self._go_on(state, settings, folder, progress)

    def resume(self, checkpoint: str | Path, *, progress: bool = True) -> FlowResult:
        """Go on where a run with this folder ended, as if it had not: same numbers, same draws.

        The flow must have been built in the same way. Random layers' generators are set to where they were.

        Raises:
            InputError: there is no checkpoint, it is damaged, of another version's format or of another flow, or the device
                that the particles were on is missing.
        """
        folder, group = Path(checkpoint), joined(self.group)
        state, settings, generators = flow_checkpoint.read(folder, group, self._settings())
        self._agreed(group, lambda: self._settings() | _of_the_cloud(state.particles), True)
        for generator, stored in zip(self.generators, generators, strict=True):
            generator.set_state(stored)
        return self._go_on(state, settings, folder, progress)

    def _agreed(self, group: Peers | None, check: Callable[[], dict[str, Any]], checkpoint: bool) -> dict[str, Any]:
        """The checked settings, which on all processes that share the cloud must be those of one flow; raises as `agreed`."""
        if group is None:
            return check()

        def checked() -> tuple[dict[str, Any], Call]:
            settings = check()
            told = {name: settings[name] for name in ("depth", "generators", "width", "dtype")}
            for name, each in (("layers", self.layers), ("observables", self.observables)):
                # A function may hold what belongs to its process; of it no more than the type is compared.
                told[name] = [
                    (type(one).__name__, digest if dataclasses.is_dataclass(one) else None)
                    for one, digest in zip(each, settings[name], strict=True)
                ]
            return settings, Call("Flow", told | {"presence of a checkpoint": checkpoint})

        return together(group, checked)[0]

    def _go_on(self, state: State, settings: dict[str, Any], folder: Path | None, progress: bool) -> FlowResult:
        group = joined(self.group)
        console = Console(file=sys.stderr)
        silent = not (progress and console.is_terminal and (group is None or group.rank == 0))
        remaining = range(state.done, len(self.layers))
        try:
            for index in track(remaining, "layers", console=console, transient=True, disable=silent):
                with torch.no_grad():
                    after = self._advance(state, index)
                    if folder is not None:
                        flow_checkpoint.write(folder, after, settings, self.generators, group)
                state = after
        except KeyboardInterrupt:
            pass  # the state is that after the last complete layer, and the result says that it is not the end
        complete = state.done == len(self.layers)
        return FlowResult(state.rows, state.particles, state.lineage, state.done, complete, settings)

    def _advance(self, state: State, index: int) -> State:
        """One layer, and what is observed after it."""
        layer: Any = self.layers[index]
        before = state.particles
        lineage, told = state.lineage, {}
        if isinstance(layer, ObservedLayer):
            moved = layer.observed(before)
            particles, told = moved.particles, dict(moved.readings())
            if moved.ancestors is not None:
                lineage = moved.ancestors if lineage is None else lineage[moved.ancestors]
                told |= _genealogy(lineage, index + 1)
        else:
            shares = self.group is not None and hasattr(layer, "sharded")
            particles = layer.sharded(before, group=self.group) if shares else layer(before)
        if not isinstance(particles, Tensor) or particles.ndim != 2 or len(particles) != len(before):
            given = tuple(particles.shape) if isinstance(particles, Tensor) else described(particles)
            raise ValueError(f"layer {index + 1} must return particles ({len(before)}, d), got {given}")
        rows = (*state.rows, *self._observe(particles, index + 1, told))
        return State(index + 1, particles, rows, lineage)

    def _observe(self, particles: Tensor, layer: int, told: Mapping[str, ObservableReading]) -> list[FlowRow]:
        named: dict[str, ObservableReading | Tensor | float] = {}
        more: Any = {} if self.group is None else {"group": self.group}
        for found in (told, *(observable(particles, **more) for observable in self.observables)):
            if twice := sorted(set(named) & set(found)):
                raise ValueError(f"observables must have names of their own, got {', '.join(twice)} twice")
            named |= found
        return [row for name, reading in named.items() for row in _rows(layer, name, reading)]

    def _settings(self) -> dict[str, Any]:
        """What a layer cannot change."""
        group = joined(self.group)
        known = {id(layer): fingerprint(layer) for layer in {id(layer): layer for layer in self.layers}.values()}
        return {
            "depth": len(self.layers),
            "layers": [known[id(layer)] for layer in self.layers],
            "observables": [fingerprint(each) for each in self.observables],
            "generators": [each.device.type for each in self.generators],
            "processes": 1 if group is None else group.size,
        }


def _of_the_cloud(particles: Tensor) -> dict[str, Any]:
    """Settings of the start: a layer may change them."""
    return {
        "tokens": len(particles),
        "width": particles.shape[1],
        "dtype": str(particles.dtype).removeprefix("torch."),
        "device": str(particles.device),
    }


def _genealogy(lineage: Int[Tensor, "n"], generations: int) -> dict[str, ObservableReading]:
    """How far the particles go back to the same ones of layer 0 (S19: coalescence of sequential Monte Carlo).

    `distinct_ancestors` is their number; `shared_ancestry` the probability that two particles have the same, with what it is
    where every draw is uniform over the tokens: 1 − (1 − 1/n)^generations.
    """
    sizes = lineage.unique(return_counts=True)[1].double()
    n = len(lineage)
    shared = (sizes * (sizes - 1)).sum() / (n * (n - 1)) if n > 1 else torch.ones((), dtype=torch.float64)
    neutral = -math.expm1(generations * math.log1p(-1 / n)) if n > 1 else 1.0
    return {
        "distinct_ancestors": ObservableReading(torch.tensor(float(len(sizes)))),
        "shared_ancestry": ObservableReading(shared, null=torch.tensor(neutral, dtype=torch.float64)),
    }


def _repeated(layers: Layer | Sequence[Layer], depth: int | None) -> tuple[Layer, ...]:
    if depth is not None:
        whole_number("depth", depth, least=1)
    if isinstance(layers, Sequence):
        if depth is not None:
            raise ValueError(f"depth says how often one layer is applied; got depth={depth} and {len(layers)} layers")
        if not layers:
            raise ValueError("a flow needs at least one layer, got none")
        return tuple(layers)
    if depth is None:
        raise ValueError("one layer needs depth=, which says how often it is applied")
    return (layers,) * depth


def _rows(layer: int, name: str, reading: ObservableReading | Tensor | float) -> list[FlowRow]:
    if not isinstance(reading, ObservableReading):
        reading = ObservableReading(torch.as_tensor(reading))
    if reading.value.ndim > 1:
        raise ValueError(f"an observable is a number or a vector; {name} has shape {tuple(reading.value.shape)}")
    shape, entries = reading.value.shape, reading.value.numel()
    others = [
        [None] * entries if each is None else each.double().expand(shape).reshape(-1).tolist() for each in reading[1:]
    ]
    numbers = zip(reading.value.double().reshape(-1).tolist(), *others, strict=True)
    return [
        FlowRow(layer, name, index if shape else None, value, error, null)
        for index, (value, error, null) in enumerate(numbers)
    ]
