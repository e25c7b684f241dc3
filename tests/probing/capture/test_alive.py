"""Values of tensors that last as long as these: tensors are told apart by what they are, not by their numbers or place."""

import gc
import weakref

import torch

from massieu.probing.capture.follow.alive import WhileAlive


def test_equal_tensors_and_views_have_values_of_their_own():
    values: WhileAlive[int] = WhileAlive()
    first, second = torch.ones(3), torch.ones(3)
    view = first.view(3)
    values.keep(first, 1)
    values.keep(second, 2)
    assert (values.get(first), values.get(second), values.get(view)) == (1, 2, None)


def test_a_value_goes_with_its_tensor():
    values: WhileAlive[torch.Tensor] = WhileAlive()
    tensor, held = torch.ones(3), torch.ones(4)
    gone = weakref.ref(held)
    values.keep(tensor, held)
    del held
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None
    assert len(values) == 0


def test_a_tensor_at_the_place_of_another_has_none_of_its_values():
    """Python gives the place of an object that is gone to the next one, so that both have one `id`."""
    values: WhileAlive[int] = WhileAlive()
    seen: set[int] = set()
    again = 0
    for number in range(200):
        tensor = torch.empty(1)
        again += id(tensor) in seen
        seen.add(id(tensor))
        assert values.get(tensor) is None
        values.keep(tensor, number)
        assert values.get(tensor) == number
    assert again > 0


def test_the_latest_value_counts_and_a_tensor_may_be_forgotten():
    values: WhileAlive[int] = WhileAlive()
    tensor = torch.ones(3, requires_grad=True)
    values.forget(tensor)
    values.keep(tensor, 1)
    values.keep(tensor, 2)
    gc.collect()
    assert values.get(tensor) == 2
    values.forget(tensor)
    assert values.get(tensor) is None
    values.keep(tensor, 3)
    values.clear()
    assert values.get(tensor) is None
