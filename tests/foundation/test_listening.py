"""Who is told of an attention call: in which order, and what is part of another call."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from massieu.foundation.listening import as_one_call, in_one_call, listeners, listening, unreadable


class Recorder:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.claimed = False
        self.heard: list[str] = []

    def listens(self) -> bool:
        return not self.claimed

    def hear(self, call: str) -> None:
        self.heard.append(call)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        before, self.claimed = self.claimed, True
        try:
            yield
        finally:
            self.claimed = before

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        self.heard.append(f"within {reason}")
        yield

    def refuse(self, reason: str) -> None:
        self.heard.append(f"refused {reason}")


def tell(call: str) -> None:
    for listener in listeners():
        listener.hear(call)


def test_nobody_is_told_unless_somebody_listens() -> None:
    recorder = Recorder()
    assert listeners() == ()
    with listening(recorder):
        assert listeners() == (recorder,)
    assert listeners() == ()


def test_the_outermost_is_told_first_and_an_error_leaves_nobody() -> None:
    outer = Recorder()
    inner = Recorder()

    def fail() -> None:
        with listening(outer), listening(inner):
            assert listeners() == (outer, inner)
            raise RuntimeError("the model's own")

    with pytest.raises(RuntimeError, match="the model's own"):
        fail()
    assert listeners() == ()


def test_inside_one_call_nothing_is_told() -> None:
    recorder = Recorder()
    with listening(recorder):
        tell("before")
        with as_one_call(listeners()):
            tell("inside")
            in_one_call(listeners(), tell, "inside")
        in_one_call(listeners(), tell, "inside")
        tell("behind")
    assert recorder.heard == ["before", "behind"]


@pytest.mark.parametrize(("attends", "heard"), [(True, ["refused a reason"]), (False, ["within a reason", "inside"])])
def test_an_unreadable_function_tells_its_reason(attends: bool, heard: list[str]) -> None:
    recorder = Recorder()

    @unreadable("a reason", attends=attends)
    def function(number: int) -> int:
        tell("inside")
        return number + 1

    assert function(1) == 2
    with listening(recorder):
        assert function(1) == 2
    assert recorder.heard == heard


def test_another_thread_has_listeners_of_its_own() -> None:
    result: list[object] = []
    with listening(Recorder()):
        thread = threading.Thread(target=lambda: result.append(listeners()))
        thread.start()
        thread.join()
    assert result == [()]
