"""What processes give differently where it must be equal, and what one gives wrong: one error on all of them, at once."""

import pytest
import torch
from tests.support import processes
from tests.support.ops import sharded_disagreements as work
from tests.support.rows import every_row

from massieu.ops.sharded.agreement import digest

SIZE = 3
ROOMS = {
    "attention": work.ATTENTION,
    "words": work.CROSS_ENTROPY,
    "statistics": work.STATISTICS,
    "pairs": work.CONTRAST,
}


@pytest.fixture(scope="module")
def found():
    """What each process found."""
    return processes.run(work.everything, SIZE)


@pytest.mark.medium
@every_row(("room", "name"), [(room, name) for room, rows in ROOMS.items() for name in rows])
def test_what_must_be_equal(found, room, name):
    """All processes, the third too, which gives what the first gives, say what differs."""
    told = {result.get(f"{room}: {name}") for result in found}
    assert len(told) == 1, told
    ((kind, message),) = told
    assert kind is ValueError
    assert f"all processes must give the same {name.split(',')[0]}, " in message, message
    assert "process 1" in message and "\n" not in message


@pytest.mark.medium
def test_which_function(found):
    message = "all processes must give the same function, got attention on process 0 and log_partition on process 1"
    assert {result["function"] for result in found} == {(ValueError, message)}


@pytest.mark.medium
def test_derivatives_forwards_of_one_process(found):
    kind, message = found[0]["presence of a tangent"]
    assert kind is ValueError and "presence of a tangent, got False on process 0 and True on process 1" in message


@pytest.mark.medium
@every_row("name", work.WRONG)
def test_what_one_process_gives_wrong(found, name):
    """It raises its own error, and all others say that it did, and why."""
    kind, words, _ = work.WRONG[name]
    for rank, result in enumerate(found):
        raised, message = result[f"wrong: {name}"]
        assert words in message, message
        assert raised is (kind if rank == 1 else RuntimeError)
        assert rank == 1 or message.startswith(f"process 1 refused its arguments: {kind.__name__}: ")


@pytest.mark.medium
@every_row("name", work.ALLOWED)
def test_what_may_differ(found, name):
    results = [result[f"allowed: {name}"].reshape(1, 2, 3, work.VALUE) for result in found]
    if "own" not in name:
        torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert results[0].shape == (1, 2, 3, work.VALUE)


@every_row("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool])
def test_a_digest_tells_tensors_apart(dtype):
    """One bit, the order, and numbers moved to another place; not how a tensor lies in memory."""
    tensor = torch.randint(0, 3, (5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = int(digest(tensor))
    assert int(digest(tensor.clone())) == int(digest(tensor.mT.contiguous().mT)) == wanted
    others = [tensor.flip(0), tensor.flip(1), tensor.roll(1, 1), 1 - tensor.to(torch.uint8)]
    for place in range(35):
        changed = tensor.clone()
        changed.view(-1)[place] = 1 if tensor.view(-1)[place] == 0 else 0
        others.append(changed)
    assert wanted not in {int(digest(other.to(dtype))) for other in others}
    assert len({int(digest(other)) for other in others[4:]}) == 35


def test_a_digest_of_more_than_one_block_and_of_nothing(monkeypatch):
    from massieu.ops.sharded import agreement

    tensor = torch.arange(1000.0)
    wanted = int(digest(tensor))
    monkeypatch.setattr(agreement, "_BLOCK", 64)
    assert int(digest(tensor)) == wanted
    assert int(digest(tensor[:0])) == 0
