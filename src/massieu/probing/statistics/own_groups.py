"""Groups of the user's own functions: of sampled windows, head by head, and of steps of the stream."""

from collections.abc import Mapping
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import described
from massieu.foundation.threads import one_thread
from massieu.probing.model.unexpected import OwnFunctionError, calling_own
from massieu.probing.statistics.group import SampledWindow
from massieu.probing.statistics.head_window import HeadSums, HeadWindow
from massieu.probing.statistics.layer_groups import SublayerGroup
from massieu.probing.statistics.own import Function, OwnStatistic
from massieu.probing.statistics.query_means import SHARE_ROUNDING
from massieu.probing.statistics.registry import OWN_STEPS, OWN_WINDOWS
from massieu.probing.statistics.windowed import HeadWindowGroup, WindowFunction
from massieu.probing.stream.wiring import Step
from massieu.storage.record import Statistic


class OwnWindows(HeadWindowGroup):
    """The user's own functions of a sampled window at one attention site."""

    name = OWN_WINDOWS

    def functions(self) -> Mapping[str, WindowFunction]:
        """The user's statistics of windows, each with its control."""
        statistics = (statistic for statistic in self.model.own.values() if statistic.of == "window")
        return {statistic.name: _window_function(statistic) for statistic in statistics}


def _window_function(statistic: OwnStatistic) -> WindowFunction:
    """The user's function and its control, whose results are checked at every call."""

    def measure(window: HeadWindow) -> HeadSums:
        with calling_own(statistic.function, _shared(window)):
            returned = statistic.function(window)
        return checked_sums(returned, window.call.query.shape[1], statistic.metadata.scale == "share")

    def make_control(window: HeadWindow) -> HeadWindow | None:
        assert statistic.control is not None
        with calling_own(statistic.control, _shared(window)):
            control = statistic.control(window)
        if not (control is None or isinstance(control, HeadWindow)):
            raise OwnFunctionError(f"its control returned {described(control)}; needed is a HeadWindow, or None")
        if control is not None and control.call.query.shape[1] != window.call.query.shape[1]:
            raise OwnFunctionError("its control returned a window with another number of heads")
        return control

    if statistic.control is None:
        return WindowFunction(measure)
    return WindowFunction(measure, (statistic.control.__name__, make_control))


def _shared(window: HeadWindow) -> list[Tensor | None]:
    """Tensors of a window that the model or other functions use too."""
    call = window.call
    return [call.query, call.key, call.value, call.output, call.log_weight, window.real, window.queries]


def checked_sums(returned: object, heads: int, share: bool = False) -> HeadSums:
    """The result of a user's function of a window, in float64.

    Raises:
        OwnFunctionError: it is not a sum and a divisor for each head.
    """
    expected = f"a sum and what it is divided by, two tensors of shape (H,) = ({heads},)"
    if not _are_tensors(returned, 2):
        raise OwnFunctionError(f"it returned {described(returned)}; needed is {expected}")
    for tensor in returned:
        if tensor.shape != (heads,):
            raise OwnFunctionError(f"it returned a tensor of shape {tuple(tensor.shape)}; needed is {expected}")
        if tensor.is_complex():
            raise OwnFunctionError(f"it returned complex numbers; needed is {expected}")
    total, count = (tensor.detach().double() for tensor in returned)
    if bool((count < 0).any()):
        raise OwnFunctionError("what its sum is divided by is negative")
    _check_share(total, count, share)
    return total, count


def _are_tensors(value: object, number: int) -> TypeGuard[tuple[Tensor, ...]]:
    return isinstance(value, tuple) and len(value) == number and all(isinstance(part, Tensor) for part in value)


def _check_share(total: Tensor, count: Tensor, share: bool) -> None:
    """Check that the mean of a statistic on the scale "share" lies between 0 and 1."""
    outside = (total < -SHARE_ROUNDING * count) | (total > (1 + SHARE_ROUNDING) * count)
    if share and bool((outside & (count > 0)).any()):
        raise OwnFunctionError(
            "it returned numbers outside of 0 to 1, and its scale is 'share'; is a key counted twice? If not, say "
            "scale='number'"
        )


class OwnSteps(SublayerGroup):
    """The user's own functions of the tokens of a sampled window before and after a step of the stream."""

    name = OWN_STEPS

    def named(self) -> list[Statistic]:
        """Their metadata."""
        return [statistic.metadata for statistic in self._statistics_of_steps()]

    def _statistics_of_steps(self) -> list[OwnStatistic]:
        return [statistic for statistic in self.model.own.values() if statistic.of == "step"]

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Measure one step, and its control."""
        positions = window.cloud(step)
        if not len(positions):
            return
        before, after = (part[window.row, positions].detach().cpu().double() for part in (step.before, step.after))
        statistics = self._statistics_of_steps()
        totals, counts = torch.zeros(2, len(statistics), 2, dtype=torch.float64)
        with one_thread():
            for place, statistic in enumerate(statistics):
                with self.fence(statistic.name):
                    # Copies: a function that writes into its arguments must not change those of the next one.
                    totals[place, 0], counts[place, 0] = summed_over_tokens(statistic, before.clone(), after.clone())
                    if statistic.control is None:
                        continue
                    control = _control_tokens(statistic.control, before.clone(), after.clone())
                    if control is not None:
                        totals[place, 1], counts[place, 1] = summed_over_tokens(statistic, *control)
        self.means.add(step.sublayer.index, totals, counts, window.number)


def summed_over_tokens(
    statistic: OwnStatistic, before: Float[Tensor, "T D"], after: Float[Tensor, "T D"]
) -> tuple[float, int]:
    """Sum of the finite numbers that a function returns for one step, and how many they are.

    Raises:
        OwnFunctionError: the function raised, or returned neither one number nor one for each token.
    """
    tokens = len(before)
    with calling_own(statistic.function):
        returned = statistic.function(before, after)
    if isinstance(returned, Tensor) and returned.is_complex():
        raise OwnFunctionError("it returned complex numbers; needed is one number, or one for each token")
    needed = f"needed is one number, or one for each of the {tokens} tokens"
    if not isinstance(returned, Tensor | float | int | np.number):
        raise OwnFunctionError(f"it returned {described(returned)}; {needed}")
    values = torch.as_tensor(returned, dtype=torch.float64)
    if values.dim() > 1 or (values.dim() == 1 and len(values) != tokens):
        raise OwnFunctionError(f"it returned a tensor of shape {tuple(values.shape)}; {needed}")
    finite = values.detach()[values.isfinite()]
    _check_share(finite, torch.ones(len(finite), dtype=torch.float64), statistic.metadata.scale == "share")
    return float(finite.sum()), len(finite)


def _control_tokens(control: Function, before: Tensor, after: Tensor) -> tuple[Tensor, ...] | None:
    """The tokens before and after a step without the property in question; None where there is no such thing."""
    with calling_own(control):
        returned = control(before, after)
    if returned is None:
        return None
    if not _are_tensors(returned, 2):
        raise OwnFunctionError(
            f"its control returned {described(returned)}; needed are the tokens before and after, two tensors of shape (T, D)"
        )
    return returned
