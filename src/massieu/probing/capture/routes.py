"""Reading a model's attention calls, whichever way its code computes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from massieu.foundation.listening import listening
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture, active
from massieu.probing.capture.follow.mode import ScoreFollower
from massieu.probing.capture.functions_called import FunctionsCalled
from massieu.probing.capture.interface import reading_interface
from massieu.probing.capture.own_calls import OwnCalls


@contextmanager
def capturing(model: nn.Module, observer: Callable[[AttentionCall], Tensor | None]) -> Iterator[Capture]:
    """Hand every attention call of ``model`` to ``observer`` while the block runs; the model's results stay its own.

    An observer that returns something puts it in the place of that call's output, and then they do not.

    The model is afterwards as it was, whatever happens.

    Raises:
        InputError: the model runs attention through an implementation other than ``sdpa`` or ``eager``, is being probed
            already, or was used by another thread in the meantime.
    """
    capture = Capture({module: name for name, module in model.named_modules()}, observer)
    follower = ScoreFollower(model, capture)
    capture.finish = follower.finish
    try:
        with active(capture), reading_interface(model, capture), follower, listening(OwnCalls(capture, follower)):
            yield capture
        follower.finish()
    finally:
        # The two hold each other, and with them all that the observer holds, until the garbage collector comes by.
        capture.finish = _nothing


@contextmanager
def capturing_interface(
    model: nn.Module, observer: Callable[[AttentionCall], Tensor | None]
) -> Iterator[tuple[Capture, FunctionsCalled]]:
    """`capturing` for a model that is known to attend by transformers' interface alone: nothing else is looked for.

    It takes a fraction of the time of following scores. The functions that it names tell whether that knowledge holds: they
    are to be those of a pass that was followed.

    Raises:
        InputError: as `capturing`.
    """
    capture = Capture({module: name for name, module in model.named_modules()}, observer)
    with active(capture), reading_interface(model, capture), FunctionsCalled(capture) as called:
        yield capture, called


def _nothing() -> None:
    """No forward pass is to be ended."""
