"""What a vocabulary's functions do on CUDA, without one: products of bfloat16 formed in float32, and no look at a value.

Tensors on meta show shapes and dtypes, and raise where a value is read; the product is simulated for the numbers.
"""

import importlib

import pytest
import torch
from tests.ops.test_token_statistics import explicit, inputs, logits_of
from torch._subclasses.fake_tensor import FakeTensorMode

from massieu import ops
from massieu.ops import score_tiles, vocabulary

STATISTICS = importlib.import_module("massieu.ops.token_statistics")  # the module, not the function of its name
CALLS = {
    "statistics": lambda h, w, b, y: ops.token_statistics(h, w, y, bias=b, temperature=0.7, softcap=2.0),
    "loss": lambda h, w, b, y: [ops.linear_cross_entropy(h, w, y, bias=b, label_smoothing=0.1, z_loss=0.1)],
    "factors": lambda h, w, b, y: [ops.linear_cross_entropy(h, w, y, bias=b, class_weight=w.detach()[:, 0])],
    "shares": lambda h, w, b, y: [ops.linear_cross_entropy(h, w, w.new_ones(len(h), len(w)), bias=b, softcap=2.0)],
}


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Rows of bfloat16 are multiplied as they are, whatever the device."""
    for room in (vocabulary, STATISTICS):
        monkeypatch.setattr(room, "rows_for_product", lambda row, column: row)


@pytest.mark.medium
def test_which_rows_are_multiplied_as_they_are():
    with FakeTensorMode():
        for device, row, column, found in (
            ("cuda", torch.bfloat16, torch.bfloat16, torch.bfloat16),
            ("cuda", torch.bfloat16, torch.float32, torch.float32),  # under autocast
            ("cuda", torch.float16, torch.float16, torch.float32),
            ("cuda", torch.float64, torch.float64, torch.float64),
            ("cpu", torch.bfloat16, torch.bfloat16, torch.float32),
        ):
            made = (torch.empty(3, 4, device=device, dtype=dtype) for dtype in (row, column))
            assert score_tiles.rows_for_product(*made).dtype == found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("as_on_cuda")
def test_nothing_is_read_and_products_are_formed_in_float32(name, monkeypatch):
    """On meta, where reading a value raises; a product into float32 is there as on CUDA."""
    products, real = [], score_tiles.product

    def product(one, other):
        products.append((one.dtype, other.dtype))
        return real(one, other)

    monkeypatch.setattr(score_tiles, "product", product)
    shapes = (6, 4), (7, 4), (7,)
    given = [torch.empty(*shape, device="meta", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    found = CALLS[name](*given, torch.empty(6, device="meta", dtype=torch.int64))
    gradients = torch.autograd.grad(found[0].sum(), given)
    assert found[0].dtype == torch.float32 and all(part.dtype == torch.bfloat16 for part in gradients)
    assert products == [(torch.bfloat16, torch.bfloat16)] * 4  # the scores twice, and two gradients


def in_float32(one, other):
    """What the product of two matrices in bfloat16 is on CUDA."""
    assert one.dtype == other.dtype == torch.bfloat16
    return one.float() @ other.float()


@pytest.mark.usefixtures("as_on_cuda")
def test_numbers_with_products_of_bfloat16(monkeypatch):
    """Scores are exact as before; in the gradients the weights are rounded to bfloat16, each by 2⁻⁹ at most."""
    monkeypatch.setattr(score_tiles, "product", in_float32)
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 60)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 16)
    hidden, weight, bias, target = inputs(40, 16, 90, dtype=torch.bfloat16)
    found = ops.token_statistics(hidden, weight, target, bias=bias, temperature=0.8, softcap=6.0)
    double = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = explicit(logits_of(*double, 0.8, 6.0), target)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-6, atol=2e-6)
    slopes = [
        torch.autograd.grad(parts[0].sum() + parts[1].sum(), tensors)
        for parts, tensors in ((found, (hidden, weight, bias)), (wanted, double))
    ]
    for one, other in zip(*slopes, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 2**-8 * other.norm()


@pytest.mark.usefixtures("as_on_cuda")
def test_second_derivatives_of_rows_that_are_multiplied_as_they_are(monkeypatch):
    monkeypatch.setattr(score_tiles, "product", in_float32)
    hidden, weight, _, target = inputs(5, 4, 9, dtype=torch.bfloat16)

    def curvature(h, function):
        (slope,) = torch.autograd.grad(function(h).sum(), h, create_graph=True)
        return torch.autograd.grad(slope.float().square().sum(), h)[0]

    found = curvature(hidden, lambda h: ops.token_statistics(h, weight, target).entropy)
    double = hidden.detach().double().requires_grad_()
    wanted = curvature(double, lambda h: explicit(h @ weight.double().mT, target)[1])
    assert (found.double() - wanted).norm() < 0.03 * wanted.norm()
