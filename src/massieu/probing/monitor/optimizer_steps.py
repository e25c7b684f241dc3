"""What the steps of optimisers show of training: gradient norms, learning rates, and weights that stay as they were."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from massieu.foundation.shards import has_flat_shards
from massieu.probing.monitor.clipped_norms import ClippedNorms
from massieu.probing.monitor.layer_norms import LayerNorms
from massieu.probing.monitor.norms import gradient_norm
from massieu.probing.monitor.notices import Notices
from massieu.probing.monitor.optimizers import learning_rates, parameters_of
from massieu.probing.monitor.period import Period
from massieu.probing.monitor.unchanged_weights import UnchangedWeights


class OptimizerSteps:
    """Reads the steps of optimisers that a record follows.

    Norms are taken as each optimiser's own step begins: a `GradScaler` unscales its gradients only then. The hooks do not
    keep this object alive.

    Args:
        optimizers: those that train the model; without any, gradients are read when a record is made.
        period: says which steps a record follows.
        layer_norms: which takes the same gradients by layer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        period: Period,
        layer_norms: LayerNorms | None,
        notices: Notices,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._period = period
        self._layer_norms = layer_norms
        self._notices = notices
        self._unchanged_weights = UnchangedWeights()
        self._clipped_norms = ClippedNorms()
        self._norms: dict[int, float] = {}  # of the latest steps, by the optimiser's id
        self._training_step: int | None = None  # at which the loop has called the monitor
        self._steps_since = Counter[int]()  # of each optimiser, by its id
        self._hooks = [optimizer.register_step_pre_hook(_weakly(self._begin_step)) for optimizer in optimizers]
        self._hooks += [optimizer.register_step_post_hook(_weakly(self._end_step)) for optimizer in optimizers]

    def close(self) -> None:
        """Take the hooks off the optimisers."""
        for hook in self._hooks:
            hook.remove()

    def arrive(self, step: int, is_due: bool) -> None:
        """The loop has called the monitor at this step; if no record is made, what the steps before showed is forgotten."""
        self._training_step = step
        self._steps_since.clear()
        if is_due:
            return
        self._norms.clear()
        self._unchanged_weights.clear()
        if self._layer_norms is not None:
            self._layer_norms.clear()

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._steps_since[id(optimizer)] += 1
        if not self._record_follows(optimizer) or not self.norms_are_known:
            return
        parameters = parameters_of([optimizer])
        norm = gradient_norm(parameters)
        if norm is not None:
            self._norms[id(optimizer)] = norm
            if self._layer_norms is not None:
                self._layer_norms.take(parameters, id(optimizer))
        self._unchanged_weights.begin(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        if self._record_follows(optimizer):
            self._unchanged_weights.end(optimizer)

    def _record_follows(self, optimizer: Optimizer) -> bool:
        """Whether a record follows the step that this optimiser takes: a loop may call the monitor at due steps alone."""
        if self._training_step is None:
            return True
        return self._period.is_due(self._training_step + self._steps_since[id(optimizer)])

    # For a record ----------------------------------------------------------------------------------------------------

    @property
    def norms_are_known(self) -> bool:
        """Whether gradients and weights tell of themselves which share of them this process has."""
        return not has_flat_shards(self._model)

    def values(self, given_norm: float | None) -> dict[str, float]:
        """Gradient norm and learning rates.

        Args:
            given_norm: takes the place of the norm that was measured.
        """
        rates = learning_rates(self._optimizers)
        norm = self._norm_of_steps() if given_norm is None else given_norm
        # Where no optimiser has stepped since the latest record, the gradients that are left may be the same ones again.
        is_new = norm is not None or not self._optimizers
        if norm is None and self.norms_are_known:
            norm = gradient_norm(self._trained())
        self._norms.clear()
        if norm is None:
            return rates
        if is_new and self._clipped_norms.notices(norm):
            self._notices.clipped_norm(norm)
        return {"gradient_norm": norm, **rates}

    def _norm_of_steps(self) -> float | None:
        """Of all gradients together, as the latest steps began; None where no optimiser has stepped."""
        return math.hypot(*self._norms.values()) if self._norms else None

    def layer_values(self, given_norm: float | None) -> dict[str, float]:
        """Norms of gradients and weights by layer; empty where nobody asks for them or they are not known."""
        if self._layer_norms is None or not self.norms_are_known:
            return {}
        if self._layer_norms.is_empty:
            self._layer_norms.take(self._trained())
        return self._layer_norms.of_gradients(given_norm) | self._layer_norms.of_weights()

    def share_of_unchanged_weights(self) -> float | None:
        """Of the weights in half precision; None where no such weight was trained."""
        return self._unchanged_weights.share()

    def _trained(self) -> Iterable[Tensor]:
        return parameters_of(self._optimizers) if self._optimizers else self._model.parameters()


def _weakly(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook that calls a method with the optimiser, as long as the method's object is alive."""
    reference = weakref.WeakMethod(method)

    def call(optimizer: Optimizer, *_: Any) -> None:
        living_method = reference()
        if living_method is not None:
            living_method(optimizer)

    return call
