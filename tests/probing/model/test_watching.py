"""Hooks of one thread, tensors that are one in memory, and values with tensors in them."""

import threading
import weakref

import numpy as np
import pytest
import torch

from massieu.probing.model.watching import LatestTensors, TensorIdentity, hooked, mapped, memory, same_tensor


def test_hooks_see_this_threads_calls_alone_and_are_removed():
    modules = [torch.nn.Linear(3, 3), torch.nn.Identity()]
    seen = []
    with hooked(
        modules,
        before=lambda module, arguments, keywords: seen.append(("before", module, arguments, keywords)),
        after=lambda module, arguments, keywords, output: seen.append(("after", module, output)),
    ):
        given = torch.ones(1, 3)
        output = modules[0](input=given)
        other = threading.Thread(target=modules[0], args=(given,))
        other.start()
        other.join()
    modules[0](given)
    assert [entry[:2] for entry in seen] == [("before", modules[0]), ("after", modules[0])]
    assert seen[0][2:] == ((), {"input": given})
    assert seen[1][2] is output


def test_hooks_are_removed_after_an_error():
    module = torch.nn.Identity()
    seen = []
    with pytest.raises(KeyError), hooked([module], after=lambda *_: seen.append(1)):
        raise KeyError
    module(torch.ones(1))
    assert not seen


def test_one_memory_and_one_view():
    whole = torch.arange(4.0).reshape(2, 2)
    assert memory(whole) == memory(whole.mT) == memory(whole.flatten())
    assert memory(whole) != memory(whole[:1])
    assert memory(whole) != memory(whole.clone())
    assert memory(torch.empty(0)) is memory("text") is None
    assert same_tensor(whole, whole.view(2, 2))
    assert not same_tensor(whole, whole.mT)
    assert not same_tensor(whole, whole.flatten())


def test_whereabouts_are_of_one_memory_and_one_view():
    whole = torch.arange(4.0).reshape(2, 2)
    place = TensorIdentity(whole)
    assert place == TensorIdentity(whole.view(2, 2))
    others = (
        whole.mT,
        whole.flatten(),
        whole[:1],
        whole.view(torch.int32),
        whole.clone(),
        torch.empty(2, 2, device="meta"),
    )
    assert [place == TensorIdentity(other) for other in others] == [False] * len(others)
    assert TensorIdentity(whole[:1]) != TensorIdentity(whole[1:])
    assert place != "text"


def test_whereabouts_hold_no_memory_and_know_it_from_what_lies_there_next():
    numbers = np.zeros(4)
    place, address = TensorIdentity(first := torch.from_numpy(numbers)), first.data_ptr()
    del first
    second = torch.from_numpy(numbers)
    assert second.data_ptr() == address
    assert place != TensorIdentity(second)
    place, held = TensorIdentity(second), weakref.ref(numbers)
    del second, numbers
    assert held() is None


def test_tensors_inside_tuples_and_lists_are_mapped():
    one, two = torch.ones(2), torch.zeros(2)
    found = mapped((one, [two, None, "word"], 3), lambda tensor: tensor + 1)
    assert isinstance(found, tuple)
    assert isinstance(found[1], list)
    assert torch.equal(found[0], one + 1)
    assert torch.equal(found[1][0], two + 1)
    assert (*found[1][1:], found[2]) == (None, "word", 3)


def test_notes_on_tensors_live_as_long_as_their_memory():
    """A new tensor in the place of one that is gone is another: its note is not the old one's."""
    notes = LatestTensors[str](2)
    tensor = torch.ones(1000)
    place = memory(tensor)
    notes.add(tensor, "first")
    view = tensor.view(10, 100)
    assert notes.get(memory(view)) == "first"
    assert place in notes
    storage = weakref.ref(tensor.untyped_storage())
    del tensor, view
    assert storage() is None  # it is not held
    assert place not in notes
    assert notes.get(place) is None
    again = [torch.zeros(1000) for _ in range(50)]  # one of them most often lies where the first did
    assert not any(memory(each) in notes for each in again)


def test_of_more_tensors_the_latest_are_known():
    notes = LatestTensors[int](2)
    tensors = [torch.ones(3) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        notes.add(tensor, number)
    assert [notes.get(memory(tensor)) for tensor in tensors] == [None, 1, 2]
    notes.add(tensors[1], 10)
    notes.add(tensors[0], 0)
    assert [notes.get(memory(tensor)) for tensor in tensors] == [0, 10, None]
    notes.add(torch.empty(0), 5)
    assert notes.get(None) is None
    notes.clear()
    assert memory(tensors[0]) not in notes
