"""Attention's health while a model trains: a fixed batch is measured every so many steps, beside the training."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described, flag, whole_number
from massieu.probing.check import FirstLook, first_look
from massieu.probing.checkpoint import some
from massieu.probing.forward import named_inputs, run
from massieu.probing.model import check_loaded, model_inputs
from massieu.probing.monitor.alarms import Alarms, watched_numbers
from massieu.probing.monitor.measured_pass import MeasuredPass
from massieu.probing.monitor.places import places
from massieu.probing.monitor.processes import MonitorSums, over_processes
from massieu.probing.monitor.quantities import (
    QUANTITIES,
    SPLIT,
    STREAM,
    SiteNumbers,
)
from massieu.probing.monitor.record import MonitorRecord
from massieu.probing.monitor.training import gradient_norm
from massieu.probing.monitor.undisturbed import undisturbed
from massieu.probing.monitor.writers import Outlets
from massieu.probing.routes import capturing
from massieu.probing.unwrap import unwrapped

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
WATCHED_QUERIES = 256  # of a sequence of the training batch, for each site
"""`Monitor.watch` measures so many queries."""


class Monitor:
    """Measures every head's attention at intervals while a model trains: two lines in the training loop.

    What is measured is a batch that stays the same, since largest numbers grow with batch and context. The model runs on
    it in evaluation, uncompiled and without gradients, under the autocast that is active; modes, gradients, random
    state and hooks are afterwards what they were. Numbers are those of `massieu.probe` on the same batch; queries at position 0
    are left out. With ``torch.distributed`` every process gives its own share of the batch and calls at the same steps, and
    all get the record of the whole; a head that tensor parallelism puts elsewhere keeps its number.

    A record is a flat dictionary. ``massieu/layer3/largest_logit_max`` is over the heads of a layer, as are ``_mean`` and
    ``_min``; ``massieu/largest_logit_max`` is over the model, whose layer and head are in ``massieu/largest_logit_layer`` and
    ``_head``. Models of several stacks have ``massieu/decoder/layer3/…``, and layers of several attentions
    ``…/layer3/cross/…``. Quantities of a head, over its queries: the mean selective log Z (S25), the largest raw logit, the
    mean of the largest score above the mean score, the mean entropy in nats and as a share of log n (S8, N11), the mean
    weight on the first token (N25). ``selective_log_partition_max`` is the largest over queries too. Of the stream behind each
    layer: effective rank and mean pairwise distance (``spread``) of the tokens of sampled windows.

    Example:
        >>> import torch
        >>> import massieu
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        >>> monitor = massieu.Monitor(model, torch.randn(2, 5, 8), every=10)
        >>> [step for step in range(25) if monitor(step)]
        [0, 10, 20]
        >>> 0 < monitor(30)["massieu/layer0/entropy_fraction_mean"] <= 1
        True
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | Callable[[], Batch],
        *,
        every: int = 100,
        per_head: bool = False,
        top_k: int = 0,
        optimizer: Optimizer | None = None,
        to: object = (),
        alarms: bool = True,
        prefix: str = "massieu",
    ) -> None:
        """Look at the model once, so that what cannot be measured is known before training begins.

        Args:
            model: any module that attends; wrappers (compiled, distributed, adapters) are looked through.
            batch: what its forward takes: a tensor, a tuple of arguments or a mapping by name, padding marked as for
                `massieu.probe`; or a function that returns one.
            every: measure at steps that are multiples of this.
            per_head: also ``massieu/layer3/head5/entropy`` and so on, for every head.
            top_k: also the entropy of so many least and most entropic heads, by name.
            optimizer: its gradients' norm and learning rates are recorded too; the norm is taken as its step begins.
            to: a path (JSON lines), a Weights & Biases run, trackio, a TensorBoard writer, a function of record and step; or
                a list of these.
            alarms: compare each record with the run's own history, warn of what leaves it, and list it in the record's
                ``alarms``: see `massieu.probing.monitor.alarms.RULES`.
            prefix: what all names begin with.

        Raises:
            TypeError, ValueError: an argument that is not as described.
            InputError: a model that cannot be read, or whose recomputed attention differs from its own.
        """
        whole_number("every", every, least=1)
        whole_number("top_k", top_k, least=0)
        flag("per_head", per_head)
        flag("alarms", alarms)
        if not isinstance(prefix, str):
            raise InputError(f"prefix must be a string, got {described(prefix)}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InputError(f"optimizer must be a torch.optim.Optimizer, got {described(optimizer)}")
        self.model = unwrapped(model)
        check_loaded(self.model, type(self.model).__name__)
        self._compiled = any(hasattr(module, "_orig_mod") for module in model.modules())
        self.every, self.per_head, self.top_k, self.prefix = every, per_head, top_k, prefix
        own = callable(batch) and not isinstance(batch, Tensor | tuple | list | Mapping)
        self._batch: Any = batch if own else named_inputs(self.model, batch)
        self._optimizer = optimizer
        self._norm: float | None = None
        self._armed = True
        self._said: set[tuple[str, int]] = set()
        with undisturbed(self.model):
            inputs = self._inputs()
            if any(isinstance(value, Tensor) and not value.numel() for value in inputs.values()):
                raise InputError("the batch is empty: give one with at least one item and two tokens")
            self._find_sites(inputs)
        self.outlets = Outlets(to, self.settings)
        self._alarms = Alarms(prefix) if alarms else None
        self._watch_alarms = Alarms(prefix) if alarms else None
        self._hook = None if optimizer is None else optimizer.register_step_pre_hook(_norm_taker(self))

    @property
    def settings(self) -> dict[str, Any]:
        """What records of two runs must have in common to be compared."""
        heads = sum(info.heads for info in self._look.sites)
        layers = len({(info.block, info.layer) for info in self._look.sites})
        shared = {"every": self.every, "prefix": self.prefix, "model": type(self.model).__name__}
        return {**shared, "layers": layers, "heads": heads}

    def __call__(self, step: int, **beside: float | Tensor) -> MonitorRecord | None:
        """Measure the batch if the step is due.

        Args:
            step: of the optimiser, counted as you like.
            beside: more numbers for the record, such as ``loss=loss``; tensors of one number are read only where it is due.

        Returns:
            The record, which has gone to every target too; None where the step is not due.

        Raises:
            TypeError, ValueError: the step is no whole number from 0 on.
            InputError: what is beside is no number; processes disagree on the step.
        """
        whole_number("step", step, least=0)
        self._armed = (step + 1) % self.every == 0
        if step % self.every:
            return None
        shown = {name: _number(name, value) for name, value in beside.items()}
        with undisturbed(self.model):
            measured = self._measured(step, self._inputs())
        return self._told(measured, shown, self._alarms)

    @contextmanager
    def watch(self, step: int) -> Iterator["Watch"]:
        """Measure the training batch's own forward pass, within the block, where the step is due.

        The model stays in training and computes what it would; scores are read before dropout, of at most 256 evenly
        spaced queries of each sequence. Largest numbers of different batches are not comparable.

        Args:
            step: as in a call.

        Yields:
            What holds the ``record`` afterwards: None where the step was not due, or no process called its model.

        Raises:
            InputError: the model that the monitor was given is compiled, so that its attention cannot be seen.
        """
        whole_number("step", step, least=0)
        seen = Watch()
        if step % self.every:
            yield seen
            return
        if self._compiled or any(module._compiled_call_impl is not None for module in self.model.modules()):
            raise InputError("a compiled model cannot be watched: call the monitor, which runs a batch uncompiled")
        reading = MeasuredPass(self.model, self._look, self._places, {}, WATCHED_QUERIES)
        with reading.first_call(), capturing(self.model, reading.attention):
            yield seen
        if reading.elsewhere:
            self._warn(
                f"{type(self.model).__name__} computes attention in other places than before, which watch leaves out of the "
                "record; call the monitor, which finds its sites again"
            )
        # The others wait for a process that did not call its model too.
        measured = over_processes(reading.measured(step))
        if measured.sites:
            seen.record = self._told(measured, {}, self._watch_alarms)

    def trainer_callback(self, trainer: Any = None) -> Any:
        """A callback for transformers' ``Trainer``, which calls the monitor once in so many optimiser steps.

        Args:
            trainer: report records through it too.

        Raises:
            MissingExtraError: transformers is not installed.
        """
        require_extra("transformers", "probe")
        from massieu.probing.monitor.trainer import MonitorTrainerCallback

        return MonitorTrainerCallback(self, trainer)

    def lightning_callback(self) -> Any:
        """A callback for Lightning's ``Trainer``, which calls the monitor once in so many optimiser steps.

        Raises:
            MissingExtraError: Lightning is not installed.
        """
        from massieu.probing.monitor.lightning import lightning_callback

        return lightning_callback(self)

    def close(self) -> None:
        """Take the hook off the optimiser. A monitor is a context manager that does so at its end."""
        if self._hook is not None:
            self._hook.remove()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Measuring ---------------------------------------------------------------------------------------------------------

    def _inputs(self) -> dict[str, Any]:
        given = self._batch if isinstance(self._batch, dict) else named_inputs(self.model, self._batch())
        return model_inputs(self.model, given)

    def _find_sites(self, inputs: dict[str, Any]) -> None:
        self._look: FirstLook = first_look(self.model, inputs)
        self._places = dict(zip((info.site for info in self._look.sites), places(self._look.sites), strict=True))
        left_out = [info.site.name for info in self._look.sites if info.grade == "scores"]
        if left_out:
            self._warn(
                f"{', '.join(SPLIT)} are left out of {len(left_out)} attention modules ({left_out[0]} is the first): their "
                "scores are not known apart from their biases"
            )
        for name, reason in self._look.refused.items():
            self._warn(f"{name or type(self.model).__name__} is not measured: {reason}")
        if self._look.silent:
            self._warn(
                f"{len(self._look.silent)} modules look like attention but were not seen attending, so they are not "
                f"measured: {some(self._look.silent, 5)}"
            )

    def _measured(self, step: int, inputs: dict[str, Any]) -> MonitorSums:
        found = self._pass(inputs)
        if found is None:
            name = type(self.model).__name__
            self._warn(f"{name} computes attention in other places than before; its sites are found again")
            self._find_sites(inputs)
            found = self._pass(inputs)
            if found is None:
                raise InputError(f"{name} computes attention in other places in every pass, so it cannot be measured")
        return over_processes(found.measured(step))

    def _pass(self, inputs: dict[str, Any]) -> MeasuredPass | None:
        """A pass that was measured; None where it attended elsewhere than at the known sites."""
        names = {name for name, _ in self.model.named_modules()}
        if any(info.block not in names for info in self._look.sites):
            return None
        reading = MeasuredPass(self.model, self._look, self._places, inputs)
        with reading.hooks(), capturing(self.model, reading.attention):
            run(self.model, inputs)
        return None if reading.elsewhere or len(reading.sums) < len(self._places) else reading

    def _told(self, measured: MonitorSums, beside: dict[str, float], alarms: Alarms | None) -> MonitorRecord:
        """The record of what was measured, after it was written. Batches that differ have alarms of their own."""
        values = self._values(measured.sites)
        for layer, found in measured.stream.items():
            values |= {f"{layer}/{n}": float(t / c) if c else math.nan for n, (t, c) in zip(STREAM, found, strict=True)}
        values |= self._of_training() | beside
        named = {f"{self.prefix}/{name}" if self.prefix else name: value for name, value in values.items()}
        record = MonitorRecord(measured.step, named, _largest_logits(measured.sites))
        self._name_trouble(measured)
        if alarms is not None:
            record.alarms = alarms(watched_numbers(measured, values), measured.step)
        self.outlets(record, measured.step)
        return record

    def _values(self, sites: list[SiteNumbers]) -> dict[str, float]:
        values: dict[str, float] = {}
        for site in sites:
            for name in filter(site.has, QUANTITIES):
                values |= _over_heads(f"{site.place}/{name}", name, [site])
                for head in range(site.heads) if self.per_head else ():
                    values[f"{site.place}/head{head}/{name}"] = float(site.means(name)[head])
        for name in QUANTITIES:
            having = [site for site in sites if site.has(name)]
            if having:
                values |= _over_heads(name, name, having)
        return values | _where_largest(sites) | self._extreme(sites)

    def _extreme(self, sites: list[SiteNumbers]) -> dict[str, float]:
        """The least and the most entropic heads, by name."""
        if not self.top_k:
            return {}
        every = [(float(e), f"{s.place}/head{h}/entropy") for s in sites for h, e in enumerate(s.means("entropy"))]
        ordered = sorted(each for each in every if each[0] == each[0])
        return {name: value for value, name in (*ordered[: self.top_k], *ordered[-self.top_k :])}

    def _of_training(self) -> dict[str, float]:
        """Gradient norm and learning rates."""
        norm, self._norm = self._norm, None
        if norm is None:
            norm = gradient_norm(_parameters(self._optimizer) if self._optimizer else self.model.parameters())
        found = {} if norm is None else {"gradient_norm": norm}
        for index, group in enumerate(() if self._optimizer is None else self._optimizer.param_groups):
            found[f"learning_rate_{index}" if index else "learning_rate"] = float(group["lr"])
        return found

    def _name_trouble(self, measured: MonitorSums) -> None:
        """One warning for each head whose numbers are not finite."""
        for site in measured.sites:
            for head in np.flatnonzero(site.broken):
                if (site.place, int(head)) not in self._said:
                    self._said.add((site.place, int(head)))
                    self._warn(
                        f"at step {measured.step}, {site.place} head {head} ({site.module or 'the model'}) has {site.what}"
                    )

    @staticmethod
    def _warn(sentence: str) -> None:
        warnings.warn(f"massieu.Monitor: {sentence}", stacklevel=4)


class Watch:
    """What `Monitor.watch` measured: its ``record``, or None."""

    record: MonitorRecord | None = None


def _norm_taker(monitor: Monitor) -> Callable[..., None]:
    """A hook that takes the gradient norm as the step before a due call begins, and does not keep the monitor alive."""
    held = weakref.ref(monitor)

    def take(optimizer: Optimizer, *_: Any) -> None:
        found = held()
        if found is not None and found._armed:
            found._norm = gradient_norm(_parameters(optimizer))

    return take


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InputError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be a number, got {described(value)}") from error


def _over_heads(key: str, name: str, sites: list[SiteNumbers]) -> dict[str, float]:
    means = np.concatenate([site.means(name) for site in sites])
    selective = name == "selective_log_partition"
    largest = np.concatenate([site.maxima(name) for site in sites]) if selective else means
    return {f"{key}_mean": float(means.mean()), f"{key}_min": float(means.min()), f"{key}_max": float(largest.max())}


def _where_largest(sites: list[SiteNumbers]) -> dict[str, float]:
    """Layer and head of the largest logit; of the first NaN, where there is one."""
    every = [(v, s.layer, h) for s in sites if s.has("largest_logit") for h, v in enumerate(s.means("largest_logit"))]
    if not every:
        return {}
    _, layer, head = max(every, key=lambda each: math.inf if each[0] != each[0] else each[0])
    return {"largest_logit_layer": float(layer), "largest_logit_head": float(head)}


def _largest_logits(sites: list[SiteNumbers]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for site in sites:
        if site.has("largest_logit"):
            name, values = site.module, torch.from_numpy(site.means("largest_logit"))
            found[name] = torch.maximum(found[name], values) if name in found else values
    return found
