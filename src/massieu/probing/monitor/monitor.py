"""Attention's health while a model trains: a fixed batch is measured every so many steps, beside the training."""

import math
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from massieu.errors import InputError, require_extra
from massieu.foundation.arguments import described, flag, number, whole_number
from massieu.foundation.printable import visible
from massieu.foundation.shards import has_flat_shards
from massieu.nn.clip_logits import clip_logits, refusals
from massieu.probing.capture.attention_call import AttentionSite
from massieu.probing.capture.compiled import CompiledPasses, entry_of, fused_sites, is_compiled
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.check import FirstLook, first_look
from massieu.probing.checks.padding import PaddingCheck
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.forward import device_of, named_inputs, run
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.trunk import check_loaded
from massieu.probing.model.unwrap import unwrapped
from massieu.probing.monitor.alarms import Alarms, watched_numbers
from massieu.probing.monitor.clipping import Clipping, LargestLogits
from massieu.probing.monitor.layer_norms import LayerNorms
from massieu.probing.monitor.measured_pass import MeasuredPass, WatchedPasses
from massieu.probing.monitor.period import BUDGET, Period
from massieu.probing.monitor.places import places
from massieu.probing.monitor.processes import BatchShare, MonitorSums, batch_share, over_processes
from massieu.probing.monitor.quantities import SPLIT, SiteNumbers, quantities
from massieu.probing.monitor.record import MonitorRecord
from massieu.probing.monitor.training import (
    ClippingDoubt,
    gradient_norm,
    learning_rates,
    optimizers_of,
    parameters_of,
)
from massieu.probing.monitor.trouble import trouble
from massieu.probing.monitor.unchanged_weights import UnchangedWeights
from massieu.probing.monitor.undisturbed import undisturbed
from massieu.probing.monitor.writers import Outlets
from massieu.probing.statistics.catalogue import Named

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


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
    query · key before masks, biases and soft caps; the mean of the largest score above the mean score; the mean entropy in
    nats and as a share of log n (S8, N11); the mean weight on the first token of the document (N25).
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
        on_nan: Literal["raise"] | Callable[[MonitorRecord], object] | None = None,
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
                ``alarms``: see `massieu.probing.monitor.alarms.RULES`.
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
        self._extreme_activations, self._on_nan = extreme_activations, on_nan
        whole_number("top_k", top_k, least=0)
        flag("per_head", per_head)
        flag("alarms", alarms)
        if not isinstance(prefix, str):
            raise InputError(f"prefix must be a string, got {described(prefix)}")
        self._quantities = quantities(statistics)
        self._optimizers = optimizers_of(optimizer)
        self.model = unwrapped(model)
        check_loaded(self.model, type(self.model).__name__)
        self._entry = entry_of(model, self.model)
        self._fused_sites: list[AttentionSite | None] | None = None
        self._period = Period(every, budget)
        self.per_head, self.top_k, self.prefix = per_head, top_k, prefix
        own = callable(batch) and not isinstance(batch, Tensor | tuple | list | Mapping)
        self._batch: Any = batch if own else named_inputs(self.model, batch)
        self._norms: dict[int, float] = {}
        self._unchanged = UnchangedWeights()
        self._looks_clipped = ClippingDoubt()
        self._arrived: int | None = None
        self._steps_since = Counter[int]()  # of each optimiser
        self._said: dict[str, set[int]] = {}
        self._beyond: set[tuple[str, int]] = set()
        self._collapsed: set[str] = set()
        self._unclipped: set[str] = set()
        self._told_of_refusals: set[bool] = set()  # by `frozen`
        self._untold: set[int] = set()
        self._lost: set[str] = set()
        self._told_of_stream = False
        self._told_of_shards = False
        with undisturbed(self.model):
            inputs = self._inputs()
            if any(isinstance(value, Tensor) and not value.numel() for value in inputs.values()):
                raise InputError("the batch is empty: give one with at least one item and two tokens")
            self._find_sites(inputs)
            self._warn_of_padding(inputs)
            self._try_own_functions(inputs)
        self.layer_norms = LayerNorms(self.model, self._layer_names()) if norms else None
        self.outlets = Outlets(to, self.settings)
        self._alarms = Alarms(prefix) if alarms else None
        self._watch_alarms = Alarms(prefix) if alarms else None
        self._hooks = [
            *(each.register_step_pre_hook(_norm_taker(self, index)) for index, each in enumerate(self._optimizers)),
            *(each.register_step_post_hook(_end_of_step(self)) for each in self._optimizers),
        ]

    @property
    def every(self) -> int:
        """Steps that are multiples of this are due."""
        return self._period.every

    @property
    def norms_are_known(self) -> bool:
        """Whether gradients and weights tell of themselves which share of them this process has."""
        return not has_flat_shards(self.model)

    @property
    def settings(self) -> dict[str, Any]:
        """What records of two runs must have in common to be compared."""
        heads = sum(info.heads for info in self._look.sites)
        layers = len({(info.block, info.layer) for info in self._look.sites})
        shared = {
            "every": self.every if self._period.fixed else None,
            "prefix": self.prefix,
            "model": type(self.model).__name__,
        }
        return {**shared, "layers": layers, "heads": heads}

    def __call__(self, step: int, **beside: float | Tensor) -> MonitorRecord | None:
        """Measure the batch if the step is due.

        Args:
            step: of the optimiser, counted as you like.
            beside: more numbers for the record, such as ``loss=loss``; tensors of one number are read only where it is due.
                Of several processes the record has their mean, each counting once, however many rows it has.
                ``gradient_norm=norm``, with what ``clip_grad_norm_`` returned, takes the place of the norm that is measured.

        Returns:
            The record, which has gone to every target too; None where the step is not due.

        Raises:
            TypeError, ValueError: the step is no whole number from 0 on.
            InputError: what is beside is no number; processes disagree on the step.
            FloatingPointError: with ``on_nan="raise"``, a number of the record is NaN or infinite.
        """
        whole_number("step", step, least=0)
        if not self._begins(step):
            return None
        shown = {name: _number(name, value) for name, value in beside.items()}
        start = self._finished_work()
        with undisturbed(self.model):
            measured = self._measured(step, self._inputs(), shown)
        record = self._told(measured, measured.beside, self._alarms)
        self._period.measured(step, self._finished_work() - start)
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
        seen = Watch()
        if not self._begins(step):
            yield seen
            return
        reading = self._new_pass({})
        with self._watching(reading):
            yield seen
        self._name_failed(reading)
        if is_compiled(self._entry) and not self._told_of_stream:
            self._told_of_stream = True
            self._warn(
                "in compiled code watch sees attention alone: rank and spread of the stream are left out of its records"
            )
        # The others wait for a process that did not call its model too.
        measured = over_processes(reading.measured(step, {}, self._period.told()))
        if measured.sites:
            seen.record = self._told(measured, {}, self._watch_alarms)
        self._period.watched()

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
        found = Clipping()
        if step % every:
            yield found
            return
        reading = LargestLogits(self.model, self._look, {})
        with self._watching(reading):
            yield found
        found.largest_logits = reading.over_processes(step)
        self._name_refusals(found.largest_logits, frozen)
        # A head none of whose queries sees a key has no logit.
        above = {name: largest.clamp(min=0) for name, largest in found.largest_logits.items()}
        unknown = [name for name, largest in above.items() if not bool(largest.isfinite().all())]
        if not unknown:
            found.factors = clip_logits(self.model, bound, above, frozen=frozen)
        elif new := [name for name in unknown if name not in self._unclipped]:
            self._unclipped.update(new)
            self._warn(
                f"at step {step} the largest logits of {shortened(new, 5)} are not finite; nothing is clipped while some are"
            )

    def _name_refusals(self, largest: Mapping[str, Tensor], frozen: bool) -> None:
        """Warn once of modules that cannot be clipped, before a logit is so large that it is an error."""
        if frozen in self._told_of_refusals or not largest:
            return
        self._told_of_refusals.add(frozen)
        reasons = refusals(self.model, {name: len(logits) for name, logits in largest.items()}, frozen=frozen)
        if reasons:
            name, reason = next(iter(reasons.items()))
            self._warn(
                f"clip cannot scale the heads of {shortened(reasons, 3)}, and raises an error once a logit there is above the "
                f"bound; of {name or 'the model'}: {reason}"
            )

    @contextmanager
    def _watching(self, reading: WatchedPasses) -> Iterator[None]:
        """Around a training step whose attention is looked at.

        Raises:
            InputError: the model is compiled, and none of its attention can be seen.
        """
        if is_compiled(self._entry):
            passes = CompiledPasses(self.model, self._entry, self._sites_in_compiled_code())
            watched = reading.of_compiled_training(passes)
        else:
            watched = reading.of_training()
        with watched:
            yield
        self._name_untold(reading)
        if reading.elsewhere:
            self._warn(
                f"{type(self.model).__name__} computes attention in other places than before, which watch and clip leave out; "
                "call the monitor, which finds its sites again"
            )

    def _sites_in_compiled_code(self) -> list[AttentionSite | None]:
        """The sites of the attention functions that compiled code calls, in order, as one pass without compilation shows them.

        Raises:
            InputError: no site is among them.
        """
        if self._fused_sites is None:
            name = type(self.model).__name__
            with undisturbed(self.model):
                sites = fused_sites(self.model, model_inputs(self.model, self._inputs(), items=1))
            unseen = [info.site.name for info in self._look.sites if info.site not in sites]
            if len(unseen) == len(self._look.sites):
                raise InputError(
                    f"this compiled {name} cannot be watched: compiled code shows attention by scaled_dot_product_attention "
                    "alone, and it computes attention in another way; call the monitor, which runs a batch uncompiled"
                )
            if unseen:
                self._warn(
                    f"watch and clip leave out {len(unseen)} attention modules of the compiled {name} ({unseen[0]} is the "
                    "first), which compute attention in another way than by scaled_dot_product_attention"
                )
            self._fused_sites = sites
        return self._fused_sites

    def _begins(self, step: int) -> bool:
        """Whether the step at which training has come is due."""
        self._period.arrived(step)
        self._arrived = step
        self._steps_since.clear()
        due = self._period.is_due(step)
        if not due:
            self._norms.clear()
            self._unchanged.clear()
        if not due and self.layer_norms is not None:
            self.layer_norms.clear()
        return due

    def _next_is_due(self, optimizer: Optimizer) -> bool:
        """Whether a record follows the step that this optimiser takes: a loop may call the monitor at due steps alone."""
        return self._arrived is None or self._period.is_due(self._arrived + self._steps_since[id(optimizer)])

    def _finished_work(self) -> float:
        """The time, in seconds, at which all that was begun on the model's device is done."""
        device = device_of(self.model)
        if not self._period.fixed and device is not None and device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter()

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
        for hook in self._hooks:
            hook.remove()

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
                "scores are not known apart from their biases, or go through no softmax"
            )
        for name, reason in self._look.refused.items():
            self._warn(f"{name or type(self.model).__name__} is not measured: {reason}")
        if self._look.silent:
            self._warn(
                f"{len(self._look.silent)} modules look like attention but were not seen attending, so they are not "
                f"measured: {shortened(self._look.silent, 5)}"
            )

    def _warn_of_padding(self, inputs: dict[str, Any]) -> None:
        for sentence in PaddingCheck(self.model).warnings(inputs):
            self._warn(sentence)

    def _measured(self, step: int, inputs: dict[str, Any], beside: Mapping[str, float]) -> MonitorSums:
        # Once, before the passes, of which processes may need different numbers.
        share = batch_share(step, inputs, self._look.layout.rows(self.model, inputs))
        found = self._pass(inputs, share)
        if found is None:
            name = type(self.model).__name__
            self._warn(f"{name} computes attention in other places than before; its sites are found again")
            self._find_sites(inputs)
            self._fused_sites = None
            if self.layer_norms is not None:
                self.layer_norms.layers = self._layer_names()
            found = self._pass(inputs, share)
            if found is None:
                raise InputError(f"{name} computes attention in other places in every pass, so it cannot be measured")
        return over_processes(found.measured(step, beside, self._period.told()))

    def _pass(self, inputs: dict[str, Any], share: BatchShare) -> MeasuredPass | None:
        """A pass that was measured; None where it attended elsewhere than at the known sites."""
        names = {name for name, _ in self.model.named_modules()}
        if any(info.block not in names for info in self._look.sites):
            return None
        reading = self._new_pass(inputs, share)
        with reading.hooks(), capturing(self.model, reading.attention):
            run(self.model, inputs)
        self._name_untold(reading)
        self._name_failed(reading)
        return None if reading.elsewhere or len(reading.sums) < len(self._places) else reading

    def _new_pass(self, inputs: dict[str, Any], share: BatchShare | None = None) -> MeasuredPass:
        return MeasuredPass(
            self.model, self._look, self._places, inputs, self._quantities, share, self._extreme_activations
        )

    def _try_own_functions(self, inputs: dict[str, Any]) -> None:
        """That the user's own functions work, before training begins.

        Raises:
            InputError: one does not.
        """
        if not any(each.own for each in self._quantities.values()):
            return
        reading = self._new_pass(inputs)
        with capturing(self.model, reading.attention):
            run(self.model, inputs)
        for name, reason in reading.failed().items():
            raise InputError(f"the statistic {name} does not work on the batch: {reason}")

    def _name_failed(self, reading: MeasuredPass) -> None:
        """Warn once of a function of the user's own that has failed: training goes on without its numbers."""
        for name, reason in reading.failed().items():
            if name not in self._lost:
                self._lost.add(name)
                self._warn(f"{name} could not be computed and is left out of this record: {reason}")

    def _name_untold(self, reading: WatchedPasses) -> None:
        """Warn, once for each length, of padding that counts as tokens because nothing in one pass tells where it is."""
        new = set(reading.tokens.untold()) - self._untold
        self._untold |= new
        if new:
            lengths = " and ".join(str(each) for each in sorted(new))
            self._warn(
                f"the batch's mask does not fit sequences of length {lengths} inside {type(self.model).__name__}; "
                "where a layer shortens the text, its queries that are padding count too"
            )

    def _told(self, measured: MonitorSums, beside: dict[str, float], alarms: Alarms | None) -> MonitorRecord:
        """The record of what was measured, after it was written. Batches that differ have alarms of their own."""
        self._period.agree(measured.period)
        values = self._values(measured.sites)
        for layer, found in measured.stream.items():
            values |= {f"{layer}/{name}": value for name, value in found.means().items()}
        if not self.norms_are_known and not self._told_of_shards:
            self._told_of_shards = True
            self._warn(
                "FullyShardedDataParallel gives each process a share of weights and gradients, so that their norms are left "
                "out; record the gradient norm with monitor(step, gradient_norm=norm), where norm is what the model's "
                "clip_grad_norm_ returned, or shard with torch.distributed.fsdp.fully_shard"
            )
        values |= self._of_training(beside) | measured.period.numbers() | beside | self._norms_by_layer(beside)
        if (unchanged := self._unchanged.share()) is not None:
            values["unchanged_weights"] = unchanged
        named = {f"{self.prefix}/{name}" if self.prefix else name: value for name, value in values.items()}
        record = MonitorRecord(
            measured.step, named, _largest_logits(measured.sites), _where(measured.sites), self.prefix
        )
        self._name_trouble(measured)
        self._name_beyond(measured)
        self._name_collapse(measured)
        if alarms is not None:
            record.alarms = alarms(watched_numbers(measured, values), measured.step)
        self.outlets(record, measured.step)
        self._act_on_nan(record, measured)
        return record

    def _values(self, sites: list[SiteNumbers]) -> dict[str, float]:
        values: dict[str, float] = {}
        for site in sites:
            for name in filter(site.has, site.names):
                values |= _over_heads(f"{site.place}/{name}", name, [site])
                for head in range(site.heads) if self.per_head else ():
                    values[f"{site.place}/head{head}/{name}"] = float(site.means(name)[head])
        for name in self._quantities:
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

    def _of_training(self, beside: dict[str, float]) -> dict[str, float]:
        """Learning rates, and the gradient norm: the one that is given beside, or else the one that is measured."""
        norms, self._norms = self._norms, {}
        norm = beside.get("gradient_norm", math.hypot(*norms.values()) if norms else None)
        # Where no optimiser has stepped since the latest record, the gradients that are left may be the same ones again.
        new = norm is not None or not self._optimizers
        if norm is None and self.norms_are_known:
            norm = gradient_norm(parameters_of(self._optimizers) if self._optimizers else self.model.parameters())
        if norm is None:
            return learning_rates(self._optimizers)
        if new and self._looks_clipped(norm):
            self._warn(
                f"the gradient norm is {norm:.4g} again and again, as if it were measured after clipping; record the one "
                "before with monitor(step, gradient_norm=norm), where norm is what clip_grad_norm_ returned"
            )
        return {"gradient_norm": norm, **learning_rates(self._optimizers)}

    def _layer_names(self) -> dict[str, str]:
        """The name of each block's layer in records: of a block that is several layers, the first."""
        names: dict[str, str] = {}
        for info in self._look.sites:
            stack = self._places[info.site].partition("layer")[0]
            names.setdefault(info.block, f"{stack}layer{info.layer}")
        return names

    def _norms_by_layer(self, beside: dict[str, float]) -> dict[str, float]:
        if self.layer_norms is None or not self.norms_are_known:
            return {}
        if self.layer_norms.is_empty:
            self.layer_norms.take(parameters_of(self._optimizers) if self._optimizers else self.model.parameters())
        return self.layer_norms.of_gradients(beside.get("gradient_norm")) | self.layer_norms.of_weights()

    def _act_on_nan(self, record: MonitorRecord, measured: MonitorSums) -> None:
        """Stop training, or call the user's function, where a number is not finite."""
        lost = [key for key, value in record.items() if not math.isfinite(value)]
        if not lost or self._on_nan is None:
            return
        if callable(self._on_nan):
            self._on_nan(record)
            return
        broken = {site.place: np.flatnonzero(site.broken).tolist() for site in measured.sites}
        what = trouble(measured.sites, broken) if any(broken.values()) else f"not finite: {shortened(lost, 5)}"
        raise FloatingPointError(f"at step {measured.step}, {what}")

    def _name_trouble(self, measured: MonitorSums) -> None:
        """One warning for all heads whose numbers are not finite for the first time."""
        broken = {site.place: set(np.flatnonzero(site.broken).tolist()) for site in measured.sites}
        new = {place: heads - self._said.get(place, set()) for place, heads in broken.items()}
        if any(new.values()):
            self._said |= {place: heads | self._said.get(place, set()) for place, heads in broken.items()}
            self._warn(f"at step {measured.step}, {trouble(measured.sites, new)}")

    def _name_beyond(self, measured: MonitorSums) -> None:
        """One warning for each head whose logits are larger than its type holds; kernels that keep scores in it lose them."""
        for site in measured.sites:
            new = [head for head in site.beyond() if (site.place, head) not in self._beyond]
            self._beyond.update((site.place, head) for head in new)
            if new:
                largest, heads = site.means("largest_logit")[new].max(), ", ".join(map(str, new))
                self._warn(
                    f"at step {measured.step}, {site.place} has logits up to {largest:.4g} in head {heads}, and its type "
                    f"holds {site.limit:.4g} at most"
                )

    def _name_collapse(self, measured: MonitorSums) -> None:
        """One warning for the layers behind which tokens have become one point, each named once."""
        layers = [layer for layer, found in measured.stream.items() if found.collapsed and layer not in self._collapsed]
        self._collapsed.update(layers)
        if layers:
            self._warn(
                f"at step {measured.step}, the tokens of a row are one point up to rounding behind {shortened(layers, 5)}; its "
                "effective rank is recorded as 1"
            )

    @staticmethod
    def _warn(sentence: str) -> None:
        warnings.warn(visible(f"massieu.Monitor: {sentence}"), stacklevel=4)


class Watch:
    """What `Monitor.watch` measured: its ``record``, or None."""

    record: MonitorRecord | None = None


def _norm_taker(monitor: Monitor, index: int) -> Callable[..., None]:
    """A hook that takes the norm of one optimiser's gradients as the step before a due call begins.

    Each optimiser's are taken as its own step begins: a `GradScaler` unscales them only then. The hook does not keep the
    monitor alive.
    """
    held = weakref.ref(monitor)

    def take(optimizer: Optimizer, *_: Any) -> None:
        found = held()
        if found is None:
            return
        found._steps_since[id(optimizer)] += 1
        if not found._next_is_due(optimizer) or not found.norms_are_known:
            return
        parameters = parameters_of([optimizer])
        if (norm := gradient_norm(parameters)) is not None:
            found._norms[index] = norm
            if found.layer_norms is not None:
                found.layer_norms.take(parameters, id(optimizer))
        found._unchanged.begin(optimizer)

    return take


def _end_of_step(monitor: Monitor) -> Callable[..., None]:
    """A hook that compares weights with those from which the step began. It does not keep the monitor alive."""
    held = weakref.ref(monitor)

    def compare(optimizer: Optimizer, *_: Any) -> None:
        found = held()
        if found is not None and found._next_is_due(optimizer):
            found._unchanged.end(optimizer)

    return compare


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


def _where(sites: list[SiteNumbers]) -> dict[str, str]:
    """The heads of the largest logit and of the least entropy, by name; the first whose number is NaN, where there is one."""
    found = {}
    for shown, name, sign in (("largest_logit_max", "largest_logit", 1), ("entropy_min", "entropy", -1)):
        every = [
            (math.inf if value != value else sign * value, f"{site.place}/head{head}")
            for site in sites
            if site.has(name)
            for head, value in enumerate(site.means(name))
        ]
        if every:
            found[shown] = max(every, key=lambda each: each[0])[1]
    return found


def _largest_logits(sites: list[SiteNumbers]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for site in sites:
        if site.has("largest_logit"):
            name, values = site.module, torch.from_numpy(site.means("largest_logit"))
            found[name] = torch.maximum(found[name], values) if name in found else values
    return found
