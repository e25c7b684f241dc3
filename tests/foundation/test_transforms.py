"""Whether values can be read, and what transforms are around, everywhere code can run."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, jvp, vmap

from massieu.foundation.transforms import (
    all_true,
    any_true,
    in_autocast_dtype,
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    repeat,
    uncompiled,
    unwrapped,
    values_are_readable,
    without_autocast,
)

TWO = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


def refuse(x):
    """A check as callers write it."""
    if any_true(x < 0):
        raise ValueError("negative")
    if not all_true(x >= 0):
        raise AssertionError("any_true and all_true disagree")
    return (x**2).sum()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: refuse(x),
        lambda x: vmap(refuse)(x),
        lambda x: vmap(vmap(refuse))(x.unsqueeze(0)),
        lambda x: grad(refuse)(x),
        lambda x: grad(lambda y: grad(refuse)(y).sum())(x),
        lambda x: jvp(refuse, (x,), (x,)),
        lambda x: hessian(refuse)(x),
        lambda x: vmap(grad(refuse))(x),
        lambda x: vmap(lambda row: jvp(refuse, (row,), (row,))[1])(x),
        lambda x: jacrev(vmap(refuse))(x),
    ],
)
def test_a_check_raises_in_every_eager_transform(call):
    call(TWO.abs())
    with pytest.raises(ValueError, match="negative"):
        call(TWO)


def test_the_whole_batch_is_read():
    # One item of the batch is negative: the other is told so too.
    assert vmap(lambda row: torch.tensor(any_true(row < 0)))(TWO).tolist() == [True, True]
    assert vmap(lambda row: torch.tensor(all_true(row > 0)))(TWO).tolist() == [False, False]
    assert vmap(lambda row: row * unwrapped(row).shape[0])(TWO).tolist() == (2 * TWO).tolist()


def test_nothing_is_read_on_meta_or_of_fake_tensors():
    for tensor in (TWO.to("meta"), FakeTensorMode().from_tensor(TWO)):
        assert not values_are_readable(tensor)
        assert not values_are_readable(TWO, tensor)
        refuse(tensor)
        assert not any_true(tensor < 0)
        assert all_true(tensor > 100)
    vmap(refuse)(TWO.to("meta"))
    with FakeTensorMode() as mode:
        vmap(refuse)(mode.from_tensor(TWO))
    assert values_are_readable()
    assert values_are_readable(TWO)


@pytest.mark.medium
def test_nothing_is_read_in_an_export():
    class Module(torch.nn.Module):
        def forward(self, x):
            return refuse(x)

    torch.export.export(Module(), (TWO,))


@pytest.mark.slow
def test_nothing_is_read_while_compiling():
    def both(x):
        return refuse(x) + vmap(refuse)(x).sum() + grad(refuse)(x).sum()

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TWO), torch.tensor(15.0 * 2 + 2 * TWO.sum().item()))


def test_which_transforms_are_around():
    seen = []

    def look(x):
        seen.append((in_functorch(), in_nested_forward_mode()))
        return (x**2).sum()

    look(TWO)
    vmap(look)(TWO)
    jvp(look, (TWO,), (TWO,))
    jvp(lambda x: jvp(look, (x,), (TWO,))[1], (TWO,), (TWO,))
    grad(lambda x: jvp(look, (x,), (TWO,))[1])(TWO)
    assert seen == [(False, False), (True, False), (True, False), (True, True), (True, False)]


def test_whether_a_derivative_may_be_wanted():
    seen = []

    def look(x):
        seen.append(may_be_differentiated(x))
        return (x**2).sum()

    needed = TWO.clone().requires_grad_()
    look(TWO)
    look(needed)
    vmap(look)(TWO)
    vmap(look)(needed)
    grad(look)(TWO)
    jvp(look, (TWO,), (TWO,))
    vmap(grad(look))(TWO)
    assert seen == [False, True, False, True, True, True, True]
    with torch.no_grad():
        assert not may_be_differentiated(needed)
    with torch.autograd.forward_ad.dual_level():
        assert may_be_differentiated(TWO)
    assert not may_be_differentiated()
    assert not may_be_differentiated(torch.arange(3))
    assert may_be_differentiated(torch.arange(3), needed)


def test_a_loop_ends_with_its_last_item():
    def halve(x):
        return repeat(lambda s: torch.where(s > 1, s / 2, s), x, lambda s: s > 1, limit=20)

    start = torch.tensor([[8.0, 0.5], [3.0, 1.0]])
    expected = torch.tensor([[1.0, 0.5], [0.75, 1.0]])
    torch.testing.assert_close(halve(start), expected)
    torch.testing.assert_close(vmap(halve)(start), expected)
    torch.testing.assert_close(repeat(lambda s: s + 1, start, lambda s: s < 1e9, limit=3), start + 3)
    assert halve(start.to("meta")).shape == start.shape


@pytest.mark.slow
def test_a_compiled_loop_ends_too():
    def halve(x):
        return repeat(lambda s: torch.where(s > 1, s / 2, s), x, lambda s: s > 1, limit=20)

    start = torch.tensor([[8.0, 0.5], [3.0, 1.0]])
    torch.testing.assert_close(torch.compile(halve, backend="eager", fullgraph=True)(start), halve(start))


def test_autocast():
    assert in_autocast_dtype(TWO, None)[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, same, whole, none, word = in_autocast_dtype(TWO, TWO.double(), torch.arange(2), None, "x")
        assert half.dtype == torch.bfloat16
        assert same.dtype == torch.float64
        assert whole.dtype == torch.int64
        assert none is None
        assert word == "x"
        with without_autocast(TWO.device):
            assert (TWO @ TWO).dtype == torch.float32
        assert (TWO @ TWO).dtype == torch.bfloat16
    with without_autocast(torch.device("meta")):
        pass


def test_uncompiled_keeps_the_call():
    @uncompiled
    def doubled(x, *, times=2):
        """Says what it does."""
        return times * x

    assert doubled(3) == 6
    assert doubled(3, times=3) == 9
    assert doubled.__doc__ == "Says what it does."
