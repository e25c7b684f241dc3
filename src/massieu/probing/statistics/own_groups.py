"""Groups of the user's own functions: of sampled windows, head by head, and of steps of the stream."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import described
from massieu.foundation.threads import one_thread
from massieu.probing.model.unexpected import OwnFunctionError, calling_own
from massieu.probing.statistics.group import SampledWindow
from massieu.probing.statistics.head_window import HeadWindow, Sums
from massieu.probing.statistics.layer_groups import SublayerGroup
from massieu.probing.statistics.own import OwnStatistic
from massieu.probing.statistics.query_means import SHARE_ROUNDING
from massieu.probing.statistics.registry import OWN_STEPS, OWN_WINDOWS
from massieu.probing.statistics.windowed import HeadWindowGroup, WindowFunction
from massieu.probing.stream.wiring import Step
from massieu.storage.record import Statistic


class OwnWindows(HeadWindowGroup):
    """The user's own functions of a sampled window at one attention site."""

    name = OWN_WINDOWS

    def functions(self) -> Mapping[str, WindowFunction]:
        """Each with its control."""
        own = (each for each in self.model.own.values() if each.of == "window")
        return {each.name: _window_function(each) for each in own}


def _window_function(own: OwnStatistic) -> WindowFunction:
    def measure(window: HeadWindow) -> Sums:
        with calling_own(own.function, _shared(window)):
            given = own.function(window)
        return checked_sums(given, window.call.query.shape[1], own.said.scale == "share")

    def other(window: HeadWindow) -> HeadWindow | None:
        assert own.control is not None
        with calling_own(own.control, _shared(window)):
            given = own.control(window)
        if not (given is None or isinstance(given, HeadWindow)):
            raise OwnFunctionError(f"its control returned {described(given)}; needed is a HeadWindow, or None")
        if given is not None and given.call.query.shape[1] != window.call.query.shape[1]:
            raise OwnFunctionError("its control returned a window with another number of heads")
        return given

    return WindowFunction(measure, None if own.control is None else (own.control.__name__, other))


def _shared(window: HeadWindow) -> list[Tensor | None]:
    """Tensors of a window that are the model's own, or that other functions are given too."""
    call = window.call
    return [call.query, call.key, call.value, call.output, call.log_weight, window.real, window.queries]


def checked_sums(given: object, heads: int, share: bool = False) -> Sums:
    """What a function of a window has given.

    Raises:
        OwnFunctionError: it is not a sum and a divisor for each head.
    """
    expected = f"a sum and what it is divided by, two tensors of shape (H,) = ({heads},)"
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(each, Tensor) for each in given):
        raise OwnFunctionError(f"it returned {described(given)}; needed is {expected}")
    for each in given:
        if each.shape != (heads,):
            raise OwnFunctionError(f"it returned a tensor of shape {tuple(each.shape)}; needed is {expected}")
        if each.is_complex():
            raise OwnFunctionError(f"it returned complex numbers; needed is {expected}")
    total, count = (each.detach().double() for each in given)
    if bool((count < 0).any()):
        raise OwnFunctionError("what its sum is divided by is negative")
    _check_share(total, count, share)
    return total, count


def _check_share(total: Tensor, count: Tensor, share: bool) -> None:
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
        """What is said of each."""
        return [each.said for each in self._own()]

    def _own(self) -> list[OwnStatistic]:
        return [each for each in self.model.own.values() if each.of == "step"]

    def on_step(self, step: Step, window: SampledWindow) -> None:
        """Measure one step, and its control."""
        positions = window.cloud(step)
        if not len(positions):
            return
        tokens = [part[window.row, positions].detach().cpu().double() for part in (step.before, step.after)]
        own = self._own()
        totals, counts = torch.zeros(2, len(own), 2, dtype=torch.float64)
        with one_thread():
            for place, each in enumerate(own):
                with self.fence(each.name):
                    given = [part.clone() for part in tokens]  # whatever a function does to them is not the next one's
                    totals[place, 0], counts[place, 0] = summed_over_tokens(each, *given)
                    others = None if each.control is None else _control_of(each, tokens)
                    if others is not None:
                        totals[place, 1], counts[place, 1] = summed_over_tokens(each, *others)
        self.means.add(step.sublayer.index, totals, counts, window.number)


def summed_over_tokens(
    own: OwnStatistic, before: Float[Tensor, "T D"], after: Float[Tensor, "T D"]
) -> tuple[float, int]:
    """Sum of what a function gives of one step, and of how many numbers; those that are not finite left out.

    Raises:
        OwnFunctionError: it raised, or gave neither one number nor one a token.
    """
    number = len(before)
    with calling_own(own.function):
        given = own.function(before, after)
    if isinstance(given, Tensor) and given.is_complex():
        raise OwnFunctionError("it returned complex numbers; needed is one number, or one for each token")
    real = isinstance(given, Tensor | float | int | np.number)
    values = torch.as_tensor(given, dtype=torch.float64) if real else None
    if values is None or values.dim() > 1 or (values.dim() == 1 and len(values) != number):
        said = f"a tensor of shape {tuple(values.shape)}" if values is not None else described(given)
        raise OwnFunctionError(f"it returned {said}; needed is one number, or one for each of the {number} tokens")
    kept = values.isfinite()
    _check_share(values.detach()[kept], torch.ones(int(kept.sum()), dtype=torch.float64), own.said.scale == "share")
    return float(values.detach()[kept].sum()), int(kept.sum())


def _control_of(own: OwnStatistic, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The tokens before and after a step without the property in question; None where there is no such thing."""
    assert own.control is not None
    with calling_own(own.control):
        given = own.control(*(part.clone() for part in tokens))
    if given is None:
        return None
    if not isinstance(given, tuple) or len(given) != 2 or not all(isinstance(each, Tensor) for each in given):
        raise OwnFunctionError(
            f"its control returned {described(given)}; needed are the tokens before and after, two tensors of shape (T, D)"
        )
    return given
