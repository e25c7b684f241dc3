"""Values: classes are abstract or final, pytrees, moved and promoted; batch shapes are prefixes."""

import dataclasses
from abc import abstractmethod

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from massieu.foundation.values import (
    Value,
    align,
    longest_batch,
    need_batch,
    promoted_dtype,
    spread,
    static_field,
)


class Shape(Value):
    _family = "shapes"
    name: str = static_field(kw_only=True, default="unnamed")

    @abstractmethod
    def area(self) -> Tensor: ...


class Square(Shape):
    side: Tensor

    def area(self):
        return self.side**2


class Pair(Value):
    left: Square
    right: Square
    index: Tensor
    note: str | None = static_field(default=None)


def pair() -> Pair:
    return Pair(Square(torch.ones(2)), Square(torch.tensor(2.0), name="b"), torch.arange(3), "note")


def test_a_class_is_abstract_or_final():
    with pytest.raises(TypeError, match="Square is final; compose shapes instead of deriving Cube"):

        class Cube(Square):
            pass

    with pytest.raises(TypeError, match="Pair is final; compose values instead of deriving Triple"):

        class Triple(Pair):
            pass

    with pytest.raises(TypeError, match="abstract"):
        Shape()  # pyright: ignore[reportAbstractUsage]


def test_a_value_is_frozen_and_compared_by_identity():
    square = Square(torch.ones(2), name="a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        square.side = torch.zeros(2)
    assert square != Square(square.side, name="a")
    assert hash(square)


def test_a_constructor_cannot_check():
    with pytest.raises(TypeError, match="Checked must check in a classmethod create"):

        class Checked(Value):
            def __post_init__(self):
                pass


class Named:
    area: Tensor


def test_what_a_base_relies_on_has_its_place_in_the_final_class():
    class Base(Named, Value):
        @abstractmethod
        def size(self) -> Tensor: ...

    class Disc(Base):
        radius: Tensor
        area: Tensor

        def size(self):
            return self.area

    assert [field.name for field in dataclasses.fields(Disc)] == ["radius", "area"]


def test_pytree_round_trip():
    value = pair()
    leaves, structure = pytree.tree_flatten(value)
    assert len(leaves) == 3
    back = pytree.tree_unflatten(leaves, structure)
    assert (back.note, back.right.name, back.left.name) == ("note", "b", "unnamed")
    assert back.left.side is value.left.side
    # Static fields are structure.
    assert structure != pytree.tree_structure(dataclasses.replace(value, note="another"))
    # Transforms put other things than tensors in a value.
    assert pytree.tree_map(lambda _: None, value).index is None


def test_transforms_take_and_return_values():
    squares = Square(torch.tensor([1.0, 2.0]), name="s")
    torch.testing.assert_close(vmap(lambda s: s.area())(squares), torch.tensor([1.0, 4.0]))
    slope = grad(lambda s: s.area().sum())(squares)
    assert isinstance(slope, Square)
    assert slope.name == "s"
    torch.testing.assert_close(slope.side, 2 * squares.side)


@pytest.mark.slow
def test_a_value_is_made_in_compiled_code():
    def doubled(square):
        made = Square(2 * square.side, name=square.name).to(torch.float64)
        return made._promoted(square.side)[0].area().sum() + grad(lambda s: s.area().sum())(square).side.sum()

    square = Square(torch.ones(3))
    result = torch.compile(doubled, backend="eager", fullgraph=True)(square)
    torch.testing.assert_close(result, doubled(square))


def test_to_moves_what_it_should():
    value = pair().to(torch.float64)
    assert value.left.side.dtype == torch.float64
    assert value.index.dtype == torch.int64
    assert value.note == "note"
    assert {leaf.device.type for leaf in pair().to("meta")._tensors()} == {"meta"}
    both = pair().to("meta", torch.bfloat16)
    assert (both.left.side.dtype, both.left.side.device.type, both.index.dtype) == (torch.bfloat16, "meta", torch.int64)
    with pytest.raises(TypeError, match=r"Pair can be moved to a floating-point dtype, got torch\.int64"):
        pair().to(torch.int64)
    with pytest.raises(TypeError, match="to takes a dtype, a device or both, got int"):
        pair().to(3)  # pyright: ignore[reportArgumentType]


def test_promotion_is_to_at_least_float32():
    half = Square(torch.ones(2, dtype=torch.bfloat16))
    value, eta = half._promoted(torch.ones(2, dtype=torch.float16))
    assert value.side.dtype == eta.dtype == torch.float32
    value, eta = half._promoted(torch.ones(2, dtype=torch.float64))
    assert value.side.dtype == eta.dtype == torch.float64
    single = Square(torch.ones(2))
    assert single._promoted(torch.ones(1))[0] is single
    value, index = pair()._promoted(torch.ones(2, dtype=torch.float64))
    assert value.index.dtype == torch.int64
    assert promoted_dtype() == torch.float32


def test_numbers_follow_where_asked():
    scale = Square(torch.tensor(2.0, dtype=torch.float64))
    assert scale._promoted(torch.ones(2))[1].dtype == torch.float64
    value, x = scale._promoted(torch.ones(2), numbers_follow=True)
    assert value.side.dtype == x.dtype == torch.float32
    value, x = Square(torch.ones(2, dtype=torch.float64))._promoted(torch.ones(2), numbers_follow=True)
    assert x.dtype == torch.float64


def test_one_device():
    Square(torch.tensor(1.0))._check_device(eta=torch.ones(2, device="meta"))
    with pytest.raises(
        ValueError, match=r"must be on one device, got eta on meta and Square on cpu: move one with \.to"
    ):
        Square(torch.ones(2))._check_device(eta=torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="Square on meta"):
        Square(torch.tensor(1.0, device="meta"))._check_device(eta=torch.ones(2))


def test_alignment():
    tensor = torch.ones(2, 3, 5)
    assert align(tensor, 5, 1).shape == (2, 3, 1, 1, 5)
    assert align(tensor, 4).shape == (2, 3, 5, 1)
    assert align(tensor, 3, 2).shape == (2, 3, 5)
    with pytest.raises(
        ValueError, match=r"\(2, 3, 5\) has more dimensions than the tensor it must broadcast with \(2\)"
    ):
        align(tensor, 2)


def test_prefixes_of_batches():
    assert longest_batch("sum", [torch.Size([2]), torch.Size([2, 3]), torch.Size([])]) == (2, 3)
    with pytest.raises(ValueError, match=r"sum: batch shape \(3,\) is not a prefix of \(2, 3\)"):
        longest_batch("sum", [torch.Size([3]), torch.Size([2, 3])])
    assert spread("law", torch.ones(2, 5), (2, 3), rest=1).shape == (2, 3, 5)
    with pytest.raises(ValueError, match=r"law: batch shape \(2,\) is not a prefix of \(3, 2\)"):
        spread("law", torch.ones(2, 5), (3, 2), rest=1)
    with pytest.raises(ValueError, match=r"is not a prefix of \(\)"):
        spread("law", torch.ones(2, 5), (), rest=1)


def test_shapes_of_arguments():
    need_batch("Gaussian", "eta", (2, 7, 3), (2,), (3,))
    need_batch("Identity", "x", (2, 9), (2,))
    need_batch("Constant", "x", (2,), (2,), ())
    for shape in [(3,), (3, 3), (2, 4), (2,)]:
        with pytest.raises(ValueError, match=r"Gaussian needs eta of shape \(2,\) \+ queries \+ \(3,\) \(batch"):
            need_batch("Gaussian", "eta", shape, (2,), (3,))
    with pytest.raises(ValueError, match=r"needs x of shape \(2,\) \+ queries \+ \(d,\) .*, got \(2,\)"):
        need_batch("Identity", "x", (2,), (2,))
