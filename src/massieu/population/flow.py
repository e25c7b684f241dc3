"""A cloud of tokens that passes layer after layer, with observables recorded after each (S20, E1)."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from massieu.errors import InputError
from massieu.foundation import arguments
from massieu.foundation.arguments import described, flag, whole_number
from massieu.foundation.doors import any_of, door, sequence
from massieu.foundation.settings import fingerprint
from massieu.foundation.watching import track
from massieu.ops.sharded.agreement import Call, together
from massieu.ops.sharded.collectives import Peers
from massieu.population import flow_checkpoint
from massieu.population.cloud_shape import CloudShape
from massieu.population.flow_checkpoint import State
from massieu.population.flow_result import FlowResult, FlowRow
from massieu.population.observables import CloudMoments
from massieu.population.operator import Operator
from massieu.population.reading import Observable, ObservableReading, Processes, check_single_cloud, peers_of

Layer = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n e"]]


class Observed(Protocol):
    """The particles after a layer that draws, with what it can say of its draws."""

    @property
    def particles(self) -> Float[Tensor, "n d"]: ...
    @property
    def ancestors(self) -> Int[Tensor, "n"] | None: ...
    def readings(self) -> Mapping[str, ObservableReading]: ...


@runtime_checkable
class ObservedLayer(Protocol):
    """A layer whose draws a flow records too, such as `ResampledLayer`."""

    def observed(self, particles: Float[Tensor, "n d"], /) -> Observed: ...


class Flow:
    """Moves tokens through operators ``particles (n, d) -> particles`` and records observables after each.

    Only the observables of a layer are kept, so that memory does not grow with depth; the observables of this package need
    memory linear in n·d.

    Args:
        layers: Operators, applied in their order; or one, applied `depth` times. They run without gradients.
        observables: Callables on a cloud that return names with numbers, vectors or `ObservableReading`s. None:
            `CloudMoments` and `CloudShape`, both of time linear in the tokens.
        depth: How often one operator is applied.
        generators: Sources of random numbers that layers draw from; a checkpoint stores their states. A layer's attribute
            `generator` need not be listed. Draws from torch's global generator are not repeated by `resume`.
        group: Processes that share the cloud, each with its own tokens. A layer that has a method `sharded` is called by
            ``sharded(particles, group=group)``; any other layer must itself know the group. Observables are called with
            ``group=group``.

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
        if observables is None:
            self.observables = (CloudMoments(), CloudShape())
        else:
            self.observables = tuple(sequence("observables", observables))
        for function in (*self.layers, *self.observables):
            if not callable(function):
                raise TypeError(f"layers and observables must be callable, got {type(function).__name__}")
        if group is not None:
            for layer in self.layers:
                if isinstance(layer, Operator):
                    layer.check_shared()
            any_of("a ProcessGroup or a DeviceMesh", ProcessGroup, DeviceMesh)("group", group)
        all_generators = [
            arguments.generator("each of generators", each) for each in sequence("generators", generators)
        ]
        of_layers = [getattr(layer, "generator", None) for layer in self.layers]
        all_generators += [each for each in of_layers if isinstance(each, torch.Generator)]
        # Several layers may draw from one generator, whose state is stored once.
        self.generators = list({id(each): each for each in all_generators}.values())
        self.group = group

    @door(progress=flag)
    def run(
        self, particles: Float[Tensor, "n d"], *, checkpoint: str | Path | None = None, progress: bool = True
    ) -> FlowResult:
        """Take the particles through all layers. Ctrl-C ends the flow early and returns the layers done, as incomplete.

        Args:
            particles: The cloud, of any floating dtype; layers get it as it is. Of a shared cloud the tokens of this process.
            checkpoint: A folder to which the state is written after each layer, so that `resume` goes on bit for bit. A file
                is complete or absent, and is removed once the next one is complete.
            progress: Show a bar on a terminal, a line in a notebook.

        Raises:
            InputError: the folder has a checkpoint already, or cannot be written to.
            TypeError, ValueError: the particles are no cloud; a layer returns no cloud, or one with another number of
                tokens; two observables have the same name.
        """
        folder = None if checkpoint is None else Path(checkpoint)
        group = peers_of(self.group)

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
        """Continue a run that was interrupted, with the numbers and draws that it would have had.

        The flow must have been built in the same way. The states of its generators are restored.

        Raises:
            InputError: there is no checkpoint, it is damaged, of another version's format or of another flow, or the device
                that the particles were on is missing.
        """
        folder = Path(checkpoint)
        group = peers_of(self.group)
        stored = flow_checkpoint.read(folder, group, self._settings())
        self._agreed(group, lambda: self._settings() | _of_the_cloud(stored.state.particles), True)
        for generator, generator_state in zip(self.generators, stored.generator_states, strict=True):
            generator.set_state(generator_state)
        return self._go_on(stored.state, stored.settings, folder, progress)

    def _agreed(self, group: Peers | None, check: Callable[[], dict[str, Any]], checkpoint: bool) -> dict[str, Any]:
        """The checked settings, after all processes that share the cloud have compared theirs; raises as `check_agreement`."""
        if group is None:
            return check()

        def checked() -> tuple[dict[str, Any], Call]:
            settings = check()
            compared = {name: settings[name] for name in ("depth", "generators", "width", "dtype")}
            for name, functions in (("layers", self.layers), ("observables", self.observables)):
                # A plain function may hold what belongs to its process alone, so only its type is compared.
                compared[name] = [
                    (type(function).__name__, digest if dataclasses.is_dataclass(function) else None)
                    for function, digest in zip(functions, settings[name], strict=True)
                ]
            return settings, Call("Flow", compared | {"presence of a checkpoint": checkpoint})

        return together(group, checked)[0]

    def _go_on(self, state: State, settings: dict[str, Any], folder: Path | None, progress: bool) -> FlowResult:
        group = peers_of(self.group)
        is_shown = progress and (group is None or group.rank == 0)
        remaining = range(state.done, len(self.layers))
        try:
            for index in track(remaining, "layers", shown=is_shown):
                with torch.no_grad():
                    after = self._advance(state, index)
                    if folder is not None:
                        flow_checkpoint.write(folder, after, settings, self.generators, group)
                state = after
        except KeyboardInterrupt:
            pass  # The state is that after the last complete layer, and the result is marked as incomplete.
        complete = state.done == len(self.layers)
        return FlowResult(state.rows, state.particles, state.lineage, state.done, complete, settings)

    def _advance(self, state: State, index: int) -> State:
        """Apply one layer, and record the observables after it."""
        layer: Any = self.layers[index]
        before = state.particles
        lineage = state.lineage
        readings: dict[str, ObservableReading] = {}
        if isinstance(layer, ObservedLayer):
            observed = layer.observed(before)
            particles = observed.particles
            readings |= observed.readings()
            if observed.ancestors is not None:
                lineage = observed.ancestors if lineage is None else lineage[observed.ancestors]
                readings |= _genealogy(lineage, index + 1)
        elif self.group is not None and hasattr(layer, "sharded"):
            particles = layer.sharded(before, group=self.group)
        else:
            particles = layer(before)
        if not isinstance(particles, Tensor) or particles.ndim != 2 or len(particles) != len(before):
            returned = tuple(particles.shape) if isinstance(particles, Tensor) else described(particles)
            raise ValueError(f"layer {index + 1} must return particles ({len(before)}, d), got {returned}")
        rows = (*state.rows, *self._observe(particles, index + 1, readings))
        return State(index + 1, particles, rows, lineage)

    def _observe(self, particles: Tensor, layer: int, of_layer: Mapping[str, ObservableReading]) -> list[FlowRow]:
        """The rows of a layer: what the layer itself has read, and each observable of the particles after it."""
        by_name: dict[str, ObservableReading | Tensor | float] = {}
        options: Any = {} if self.group is None else {"group": self.group}
        for readings in (of_layer, *(observable(particles, **options) for observable in self.observables)):
            if repeated := sorted(set(by_name) & set(readings)):
                raise ValueError(f"observables must have names of their own, got {', '.join(repeated)} twice")
            by_name |= readings
        return [row for name, reading in by_name.items() for row in _rows(layer, name, reading)]

    def _settings(self) -> dict[str, Any]:
        """The settings that no layer changes."""
        group = peers_of(self.group)
        # A layer that is applied again and again is hashed once.
        distinct_layers = {id(layer): layer for layer in self.layers}
        digests = {identity: fingerprint(layer) for identity, layer in distinct_layers.items()}
        return {
            "depth": len(self.layers),
            "layers": [digests[id(layer)] for layer in self.layers],
            "observables": [fingerprint(observable) for observable in self.observables],
            "generators": [generator.device.type for generator in self.generators],
            "processes": 1 if group is None else group.size,
        }


def _of_the_cloud(particles: Tensor) -> dict[str, Any]:
    """Settings of the cloud that a flow begins with, which a layer may change."""
    return {
        "tokens": len(particles),
        "width": particles.shape[1],
        "dtype": str(particles.dtype).removeprefix("torch."),
        "device": str(particles.device),
    }


def _genealogy(lineage: Int[Tensor, "n"], generations: int) -> dict[str, ObservableReading]:
    """How few particles of layer 0 the present ones descend from (S19: coalescence of sequential Monte Carlo).

    `distinct_ancestors` is the number of these; `shared_ancestry` is the probability that two particles have the same one.
    Its null is for draws that are uniform over the tokens: 1 − (1 − 1/n)^generations.
    """
    family_sizes = lineage.unique(return_counts=True)[1].double()
    n = len(lineage)
    if n > 1:
        shared = (family_sizes * (family_sizes - 1)).sum() / (n * (n - 1))
        # 1 − (1 − 1/n)^generations by logarithms, which keeps its digits for many tokens.
        neutral = -math.expm1(generations * math.log1p(-1 / n))
    else:
        shared = torch.ones((), dtype=torch.float64)
        neutral = 1.0
    return {
        "distinct_ancestors": ObservableReading(torch.tensor(float(len(family_sizes)))),
        "shared_ancestry": ObservableReading(shared, null=torch.tensor(neutral, dtype=torch.float64)),
    }


def _repeated(layers: Layer | Sequence[Layer], depth: int | None) -> tuple[Layer, ...]:
    """The layers in their order, or one layer `depth` times."""
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
    """A row for a number, or one for each entry of a vector."""
    if not isinstance(reading, ObservableReading):
        reading = ObservableReading(torch.as_tensor(reading))
    if reading.value.ndim > 1:
        raise ValueError(f"an observable is a number or a vector; {name} has shape {tuple(reading.value.shape)}")
    shape = reading.value.shape

    def entries(tensor: Tensor | None) -> list[Any]:
        if tensor is None:
            return [None] * reading.value.numel()
        return tensor.double().expand(shape).reshape(-1).tolist()

    columns = zip(entries(reading.value), entries(reading.standard_error), entries(reading.null), strict=True)
    return [
        FlowRow(layer, name, index if shape else None, value, error, null)
        for index, (value, error, null) in enumerate(columns)
    ]
