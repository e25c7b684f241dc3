"""Attention's health while a model trains: a fixed batch is measured every so many steps, beside the training."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described, flag, number, whole_number
from massieu.nn.clip_logits import clip_logits, refusals
from massieu.probing.capture.compiled import CompiledPasses, entry_of, is_compiled
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.padding import PaddingCheck
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.forward import device_of, named_inputs, run
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.trunk import check_loaded
from massieu.probing.model.unwrap import module_in, unwrapped
from massieu.probing.monitor.alarms import Alarms, watched_numbers
from massieu.probing.monitor.clipping import Clipping, LargestLogits
from massieu.probing.monitor.known_sites import KnownSites
from massieu.probing.monitor.layer_norms import LayerNorms
from massieu.probing.monitor.measured_pass import MeasuredPass
from massieu.probing.monitor.notices import Notices
from massieu.probing.monitor.optimizer_steps import OptimizerSteps
from massieu.probing.monitor.optimizers import optimizers_of
from massieu.probing.monitor.outlets import Outlets
from massieu.probing.monitor.period import BUDGET, Period
from massieu.probing.monitor.processes import BatchShare, MonitorSums, batch_share, over_processes
from massieu.probing.monitor.quantities import quantities
from massieu.probing.monitor.record import MonitorRecord
from massieu.probing.monitor.record_values import (
    extreme_entropies,
    head_values,
    heads_of_extremes,
    largest_logits_by_module,
    place_of_largest_logit,
)
from massieu.probing.monitor.trouble import trouble
from massieu.probing.monitor.undisturbed import undisturbed
from massieu.probing.monitor.warning import warn
from massieu.probing.monitor.watched_passes import WatchedPasses
from massieu.probing.statistics.catalogue import Named

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
OnNan = Literal["raise"] | Callable[[MonitorRecord], object]


class Monitor:
    """Measures every head's attention at intervals while a model trains: two lines in the training loop.

    What is measured is a batch that stays the same, since largest numbers grow with batch and context. The model runs on
    it in evaluation, uncompiled and without gradients, under the autocast that is active; modes, gradients, random
    state and hooks are afterwards what they were. Numbers are the statistics of `massieu.probe` on the same batch. Means leave
    out queries that see a single key, where no head has a choice; maxima are over all real queries. With
    ``torch.distributed`` every process gives its own share of the batch and calls at the same steps, and all get the record of
    the whole, as one process would with the shares one after the other; a number that is given beside the step is the mean of
    the processes'. A head that tensor parallelism puts elsewhere keeps its number.

    A record is a flat dictionary. ``massieu/layer3/largest_logit_max`` is over the heads of a layer, as are ``_mean`` and
    ``_min``; ``massieu/largest_logit_max`` is over the model, whose layer and head are in ``massieu/largest_logit_layer`` and
    ``_head``. Models of several stacks have ``massieu/decoder/layer3/…``, and layers of several attentions
    ``…/layer3/cross/…``. Quantities of a head, over its queries: the mean selective log Z (S25); the largest logit, scale ·
    query · key of pairs that are not masked, before biases and soft caps; the mean of the largest score above the mean
    score; the mean entropy in nats and as a share of log n (S8, N11); the mean weight on the first token of the document (N25).
    ``selective_log_partition_max`` is the largest over queries too. Of the stream behind each layer: effective rank and mean
    pairwise distance (``spread``) of the tokens of sampled windows; tokens that only rounding tells apart have rank 1, and a
    warning says so once a layer.

    ``record.summary()`` has the numbers of the whole model that one plots, at most 20.

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
        every: int | None = None,
        budget: float = BUDGET,
        per_head: bool = False,
        top_k: int = 0,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        to: object = (),
        alarms: bool = True,
        prefix: str = "massieu",
        norms: bool = False,
        extreme_activations: bool = False,
        statistics: Iterable[Named] | None = None,
        on_nan: OnNan | None = None,
    ) -> None:
        """Look at the model once, so that what cannot be measured is known before training begins.

        Args:
            model: any module that attends; wrappers (compiled, distributed, adapters) are looked through.
            batch: what its forward takes: a tensor, a tuple of arguments or a mapping by name, padding marked as for
                `massieu.probe`; or a function that returns one.
            every: measure at steps that are multiples of this; 1 if you call the monitor only where you want a record. By
                default the budget decides: the second record is that of step 100, and from then on `every` is the smallest of
                1, 2, 5, 10, 20, … up to 1,000 that keeps to it. All processes agree on it. ``monitor_every`` and
                ``monitor_share`` in the record say what was chosen and what share of time it takes.
            budget: the share of training's time that records may take, where `every` is not given.
            per_head: also ``massieu/layer3/head5/entropy`` and so on, for every head.
            top_k: also the entropy of so many least and most entropic heads, by name.
            optimizer: its gradients' norm and learning rates are recorded too; or several, with the norm of all gradients
                together. Of weights in half precision, ``unchanged_weights`` is the share that its step leaves as they were.
                The norm is taken as each one's step begins, which is after clipping: give the one before as
                ``monitor(step, gradient_norm=norm)``.
            to: a path (JSON lines), a Weights & Biases run, trackio, a TensorBoard writer, a function of record and step; or
                a list of these.
            alarms: compare each record with the run's own history, warn of what leaves it, and list it in the record's
                ``alarms``: see `massieu.probing.monitor.alarm_rules.RULES`.
            prefix: what all names begin with.
            norms: also norms of weights and gradients by layer: ``massieu/layer3/weight_norm`` and ``…/gradient_norm``. What is
                in no layer has ``massieu/outside_layers/…``, and all weights together ``massieu/weight_norm``. Where
                ``gradient_norm`` is given beside the step, the layers' gradients are before that clipping too.
            extreme_activations: also ``massieu/layer3/extreme_activations``, the share of tokens behind the layer with an entry
                above 100 in magnitude and at least 1,000 times the median magnitude of the row's (arXiv 2402.17762).
            statistics: more statistics of queries: names of the probe's, and functions of your own (`massieu.statistic`), tried
                once at the beginning. The record has their means as it has the entropy's.
            on_nan: a function that is called with every record of which a number is NaN or infinite, after it was written; or
                "raise", so that training stops there.

        Raises:
            TypeError, ValueError: an argument that is not as described.
            InputError: a model that cannot be read, or whose recomputed attention differs from its own.
        """
        if every is not None:
            whole_number("every", every, least=1)
        number("budget", budget, above=0, below=1)
        flag("norms", norms)
        flag("extreme_activations", extreme_activations)
        if not (on_nan is None or callable(on_nan) or (isinstance(on_nan, str) and on_nan == "raise")):
            raise InputError(f'on_nan must be a function or "raise", got {described(on_nan)}')
        whole_number("top_k", top_k, least=0)
        flag("per_head", per_head)
        flag("alarms", alarms)
        if not isinstance(prefix, str):
            raise InputError(f"prefix must be a string, got {described(prefix)}")
        self.per_head = per_head
        self.top_k = top_k
        self.prefix = prefix
        self._extreme_activations = extreme_activations
        self._on_nan: OnNan | None = on_nan
        self._quantities = quantities(statistics)
        optimizers = optimizers_of(optimizer)
        self.model = unwrapped(model)
        check_loaded(self.model, type(self.model).__name__)
        self._entry = entry_of(module_in(model), self.model)
        self._period = Period(every, budget)
        self._batch: Any = batch if _is_function(batch) else named_inputs(self.model, batch)
        self._notices = Notices(type(self.model).__name__)
        with undisturbed(self.model):
            inputs = self._inputs()
            if any(isinstance(value, Tensor) and not value.numel() for value in inputs.values()):
                raise InputError("the batch is empty: give one with at least one item and two tokens")
            self._sites = KnownSites(self.model, inputs, self._notices)
            for sentence in PaddingCheck(self.model).warnings(inputs):
                warn(sentence)
            self._try_own_functions(inputs)
        self.layer_norms = LayerNorms(self.model, self._sites.layer_names()) if norms else None
        self.outlets = Outlets(to, self.settings)
        # Numbers of different batches are not comparable, so those of watched steps have a history of their own.
        self._alarms = Alarms(prefix) if alarms else None
        self._watch_alarms = Alarms(prefix) if alarms else None
        self._optimizer_steps = OptimizerSteps(self.model, optimizers, self._period, self.layer_norms, self._notices)

    @property
    def every(self) -> int:
        """Steps that are multiples of this are due."""
        return self._period.every

    @property
    def norms_are_known(self) -> bool:
        """Whether gradients and weights tell of themselves which share of them this process has."""
        return self._optimizer_steps.norms_are_known

    @property
    def settings(self) -> dict[str, Any]:
        """What records of two runs must have in common to be compared."""
        return {
            "every": self.every if self._period.fixed else None,
            "prefix": self.prefix,
            "model": type(self.model).__name__,
            "layers": self._sites.num_layers,
            "heads": self._sites.num_heads,
        }

    def __call__(self, step: int, **extra: float | Tensor) -> MonitorRecord | None:
        """Measure the batch if the step is due.

        Args:
            step: of the optimiser, counted as you like.
            extra: more numbers for the record, such as ``loss=loss``; tensors of one number are read only where it is due.
                Of several processes the record has their mean, each counting once, however many rows it has.
                ``gradient_norm=norm``, with what ``clip_grad_norm_`` returned, takes the place of the norm that is measured.

        Returns:
            The record, which has gone to every target too; None where the step is not due.

        Raises:
            TypeError, ValueError: the step is no whole number from 0 on.
            InputError: an extra number is none; processes disagree on the step.
            FloatingPointError: with ``on_nan="raise"``, a number of the record is NaN or infinite.
        """
        whole_number("step", step, least=0)
        if not self._arrive(step):
            return None
        extra_numbers = {name: _as_number(name, value) for name, value in extra.items()}
        start = self._time_of_finished_work()
        with undisturbed(self.model):
            measured = self._measure(step, self._inputs(), extra_numbers)
        record = self._record(measured, self._alarms)
        self._period.add_record(step, self._time_of_finished_work() - start)
        return record

    @contextmanager
    def watch(self, step: int) -> Iterator["Watch"]:
        """Measure the training step's own forward passes, within the block, where the step is due.

        The model stays in training and computes what it would; scores are read before dropout. Several forward passes, as
        of accumulated micro-batches, are one record: maxima of all, means over all their queries. What activation
        checkpointing computes again is not counted again. Largest numbers of different batches are not comparable.

        Args:
            step: as in a call.

        Yields:
            What holds the ``record`` afterwards: None where the step was not due, or no process called its model.

        Raises:
            InputError: the model is compiled, and does not attend by `scaled_dot_product_attention`.
        """
        whole_number("step", step, least=0)
        result = Watch()
        if not self._arrive(step):
            yield result
            return
        passes = self._new_pass({})
        with self._watching(passes):
            yield result
        self._notices.failed_statistics(passes.failed())
        if is_compiled(self._entry):
            self._notices.stream_left_out()
        # The others wait for a process that did not call its model too.
        measured = over_processes(passes.measured(step, {}, self._period.proposal()))
        if measured.sites:
            result.record = self._record(measured, self._watch_alarms)
        self._period.add_watched_record()

    @contextmanager
    def clip(self, step: int, bound: float, *, every: int = 1, frozen: bool = False) -> Iterator[Clipping]:
        """QK-clip within the training loop: at the block's end the heads whose logits were above the bound are scaled to it.

        The block holds a step's forward and backward passes and the optimiser's step. Their largest logits are taken from
        the training step's own forward passes, as `watch` takes them, and of nothing else; then `massieu.nn.clip_logits`
        scales the heads that were above the bound, as the weights are after the step. A layer above one that was scaled has
        another input at the next step, whose logits are then taken.

        Args:
            step: as in a call.
            bound: the largest logit that is allowed, positive: 100 is usual.
            every: clip at steps that are multiples of this; at others nothing is done.
            frozen: scale weights that do not train too, as those below a LoRA adapter: see `massieu.nn.clip_logits`.

        Yields:
            What holds the largest ``largest_logits`` and the ``factors`` afterwards.

        Raises:
            TypeError, ValueError: as `massieu.nn.clip_logits`, whose refusals come at the first head above the bound; a
                warning after the first block says which they will be.
            InputError: the model is compiled, and does not attend by `scaled_dot_product_attention`.

        Source:
            Kimi Team, arXiv 2507.20534, section 2.1.
        """
        whole_number("step", step, least=0)
        whole_number("every", every, least=1)
        number("bound", bound, above=0)
        flag("frozen", frozen)
        result = Clipping()
        if step % every:
            yield result
            return
        passes = LargestLogits(self.model, self._sites.look, {})
        with self._watching(passes):
            yield result
        result.largest_logits = passes.over_processes(step)
        if result.largest_logits and self._notices.begins_clipping(frozen):
            num_heads = {name: len(largest) for name, largest in result.largest_logits.items()}
            self._notices.clip_refusals(refusals(self.model, num_heads, frozen=frozen))
        # A head none of whose queries sees a key has no logit.
        largest_logits = {name: largest.clamp(min=0) for name, largest in result.largest_logits.items()}
        not_finite = [name for name, largest in largest_logits.items() if not bool(largest.isfinite().all())]
        if not_finite:
            self._notices.nothing_clipped(step, not_finite)
        else:
            result.factors = clip_logits(self.model, bound, largest_logits, frozen=frozen)

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
        """Take the hooks off the optimisers. A monitor is a context manager that does so at its end."""
        self._optimizer_steps.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # When a record is due --------------------------------------------------------------------------------------------

    def _arrive(self, step: int) -> bool:
        """Whether the step at which training has come is due."""
        self._period.arrive(step)
        is_due = self._period.is_due(step)
        self._optimizer_steps.arrive(step, is_due)
        return is_due

    def _time_of_finished_work(self) -> float:
        """The time, in seconds, at which all that was begun on the model's device is done."""
        device = device_of(self.model)
        if not self._period.fixed and device is not None and device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter()

    # Measuring -------------------------------------------------------------------------------------------------------

    def _inputs(self) -> dict[str, Any]:
        """What the model's forward is called with, on the model's device."""
        inputs = self._batch if isinstance(self._batch, dict) else named_inputs(self.model, self._batch())
        return model_inputs(self.model, inputs)

    def _measure(self, step: int, inputs: dict[str, Any], extra: Mapping[str, float]) -> MonitorSums:
        # Once, before the passes, of which processes may need different numbers.
        share = batch_share(step, inputs, self._sites.look.layout.rows(self.model, inputs))
        passed = self._run_pass(inputs, share)
        if passed is None:
            self._notices.sites_found_again()
            self._sites.find(inputs)
            if self.layer_norms is not None:
                self.layer_norms.layers = self._sites.layer_names()
            passed = self._run_pass(inputs, share)
        if passed is None:
            raise InputError(
                f"{type(self.model).__name__} computes attention in other places in every pass, so it cannot be measured"
            )
        return over_processes(passed.measured(step, extra, self._period.proposal()))

    def _run_pass(self, inputs: dict[str, Any], share: BatchShare) -> MeasuredPass | None:
        """A pass that was measured; None where it attended elsewhere than at the known sites."""
        if not self._sites.have_blocks():
            return None
        passed = self._new_pass(inputs, share)
        with passed.stream_hooks(), capturing(self.model, passed.observe):
            run(self.model, inputs)
        self._notices.unknown_padding(passed.tokens.untold())
        self._notices.failed_statistics(passed.failed())
        if passed.elsewhere or len(passed.sums) < len(self._sites.places):
            return None
        return passed

    def _new_pass(self, inputs: dict[str, Any], share: BatchShare | None = None) -> MeasuredPass:
        return MeasuredPass(
            self.model, self._sites.look, self._sites.places, inputs, self._quantities, share, self._extreme_activations
        )

    def _try_own_functions(self, inputs: dict[str, Any]) -> None:
        """Check that the user's own functions work, before training begins.

        Raises:
            InputError: one does not.
        """
        if not any(function.own for function in self._quantities.values()):
            return
        passed = self._new_pass(inputs)
        with capturing(self.model, passed.observe):
            run(self.model, inputs)
        for name, reason in passed.failed().items():
            raise InputError(f"the statistic {name} does not work on the batch: {reason}")

    @contextmanager
    def _watching(self, passes: WatchedPasses) -> Iterator[None]:
        """Around a training step whose attention is looked at.

        Raises:
            InputError: the model is compiled, and none of its attention can be seen.
        """
        if is_compiled(self._entry):
            sites = self._sites.in_compiled_code(self._inputs)
            watched = passes.of_compiled_training(CompiledPasses(self.model, self._entry, sites))
        else:
            watched = passes.of_training()
        with watched:
            yield
        self._notices.unknown_padding(passes.tokens.untold())
        if passes.elsewhere:
            self._notices.attention_elsewhere()

    # Records ---------------------------------------------------------------------------------------------------------

    def _record(self, measured: MonitorSums, alarms: Alarms | None) -> MonitorRecord:
        """The record of what was measured, after it was written."""
        self._period.adopt(measured.period)
        values = self._values(measured)
        record = MonitorRecord(
            measured.step,
            {f"{self.prefix}/{name}" if self.prefix else name: value for name, value in values.items()},
            largest_logits_by_module(measured.sites),
            heads_of_extremes(measured.sites),
            self.prefix,
        )
        self._notices.of_record(measured.step, measured.sites, measured.stream)
        if alarms is not None:
            record.alarms = alarms(watched_numbers(measured, values), measured.step)
        self.outlets(record, measured.step)
        self._act_on_nan(record, measured)
        return record

    def _values(self, measured: MonitorSums) -> dict[str, float]:
        """The record's numbers, by their names without the prefix."""
        values = head_values(measured.sites, self._quantities, self.per_head)
        values |= place_of_largest_logit(measured.sites)
        values |= extreme_entropies(measured.sites, self.top_k)
        for layer, numbers in measured.stream.items():
            values |= {f"{layer}/{name}": mean for name, mean in numbers.means().items()}
        if not self.norms_are_known:
            self._notices.norms_left_out()
        given_norm = measured.extra.get("gradient_norm")
        values |= self._optimizer_steps.values(given_norm)
        values |= measured.period.numbers()
        values |= measured.extra
        values |= self._optimizer_steps.layer_values(given_norm)
        unchanged_weights = self._optimizer_steps.share_of_unchanged_weights()
        if unchanged_weights is not None:
            values["unchanged_weights"] = unchanged_weights
        return values

    def _act_on_nan(self, record: MonitorRecord, measured: MonitorSums) -> None:
        """Stop training, or call the user's function, where a number is not finite."""
        not_finite = [key for key, value in record.items() if not math.isfinite(value)]
        if not not_finite or self._on_nan is None:
            return
        if callable(self._on_nan):
            self._on_nan(record)
            return
        broken = {site.place: site.broken_heads() for site in measured.sites}
        if any(broken.values()):
            what = trouble(measured.sites, broken)
        else:
            what = f"not finite: {shortened(not_finite, 5)}"
        raise FloatingPointError(f"at step {measured.step}, {what}")


class Watch:
    """What `Monitor.watch` measured: its ``record``, or None."""

    record: MonitorRecord | None = None


def _is_function(batch: object) -> bool:
    """Whether a batch is a function that returns one; a callable mapping is a batch."""
    return callable(batch) and not isinstance(batch, Tensor | tuple | list | Mapping)


def _as_number(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InputError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be a number, got {described(value)}") from error
