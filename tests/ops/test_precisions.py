"""Every precision: what is computed of rounded numbers is that of those numbers in float64, and no coarser than it must be."""

import itertools

import pytest
import torch
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.rounding import FAST_EXPONENTIAL
from tests.support.rows import every_row, one_in

from massieu import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SINGLE = torch.finfo(torch.float32).eps
HIDING = draw(1, 1, 12, 10, seed=5) > -0.4
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (3, 1)},
    "kept pairs": {"log_weight": HIDING},
    "weights": {"log_weight": torch.where(HIDING, draw(1, 4, 12, 10, seed=6), -torch.inf)},
    "soft cap": {"softcap": 1.5, "is_causal": True},
    "sink": {"sink": 0.4, "log_weight": HIDING},
    "scale": {"scale": 3.0, "window": 2},
}


def rounded(dtype, *shapes):
    """Numbers of that dtype, with a gradient, and the same in float64."""
    narrow = [draw(*shape, seed=place).to(dtype).requires_grad_() for place, shape in enumerate(shapes)]
    return narrow, [each.detach().double().requires_grad_() for each in narrow]


def error(found, wanted):
    """Relative, in the 2-norm, to numbers of at least 1."""
    difference = torch.where(found.double() == wanted, 0.0, found.double() - wanted)
    return (difference.norm() / wanted.where(wanted.isfinite(), 0.0).norm().clamp_min(1.0)).item()


def assert_gradients(results, exact, narrow, wide, bound):
    """For cotangents of all results, of which −inf has none."""
    grads = [draw(*each.shape, seed=9 + place).where(each.isfinite(), 0.0) for place, each in enumerate(exact)]
    pairs = zip(grads, results, strict=True)
    found = torch.autograd.grad(results, narrow, [grad.to(each.dtype) for grad, each in pairs], allow_unused=True)
    pairs = zip(grads, results, strict=True)
    grads = [grad.to(each.dtype).double() for grad, each in pairs]
    wanted = torch.autograd.grad(exact, wide, grads, allow_unused=True)
    for one, other, given in zip(found, wanted, narrow, strict=True):
        assert one.dtype == given.dtype
        assert error(one, other) <= bound, f"gradient off by {error(one, other):.1e}, above {bound:.1e}"


@one_in(2, {"options": OPTIONS.values(), "backend": ["blocks", "reference"]})
@pytest.mark.parametrize("dtype", DTYPES)
def test_moments(dtype, backend, options):
    narrow, wide = rounded(dtype, (1, 4, 12, 8), (1, 2, 10, 8), (1, 2, 10, 5))
    if backend == "blocks":
        narrow = [each.detach() for each in narrow]
    found = ops.attention_moments(*narrow, **options, backend=backend)._asdict()
    wanted = explicit.moments(*wide, **options)
    names = [name for name in wanted if name in found]
    assert len(names) >= 11
    for name in names:
        bound = torch.finfo(dtype).eps + 4 * SINGLE if name == "output" else 20 * SINGLE
        assert error(found[name], wanted[name]) <= bound, f"{name}: {error(found[name], wanted[name]):.1e}"
        assert found[name].dtype in (dtype if name == "output" else torch.float32, torch.int64)
    if backend == "reference":
        smooth = [name for name in names if found[name].requires_grad]
        assert_gradients(
            [found[name] for name in smooth],
            [wanted[name] for name in smooth],
            narrow,
            wide,
            2 * torch.finfo(dtype).eps + 40 * SINGLE,
        )


@one_in(
    2,
    {
        "options": [options for options in OPTIONS.values() if "softcap" not in options],
        "backend": ["blocks", "reference"],
    },
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fisher_products(dtype, backend, options):
    narrow, wide = rounded(dtype, (1, 4, 12, 8), (1, 2, 10, 8), (1, 4, 12, 8))
    if backend == "blocks":
        narrow = [each.detach() for each in narrow]
    found, wanted = ops.fisher_vp(*narrow, **options, backend=backend), explicit.fisher_vp(*wide, **options)
    bound = torch.finfo(dtype).eps + 20 * SINGLE
    assert found.dtype == dtype
    assert error(found, wanted) <= bound
    if backend == "reference":
        assert_gradients([found], [wanted], narrow, wide, 3 * bound)


LABELS = torch.randint(20, (30,), generator=torch.Generator().manual_seed(1))
LOSSES = {
    "linear_cross_entropy": (lambda h, w, b: ops.linear_cross_entropy(h, w, LABELS, bias=b), ((30, 8), (20, 8), (20,))),
    "with all it has": (
        lambda h, w, b: ops.linear_cross_entropy(h, w, LABELS, bias=b, label_smoothing=0.1, z_loss=0.1),
        ((30, 8), (20, 8), (20,)),
    ),
    "info_nce": (lambda q, k: ops.info_nce(q, k, temperature=0.5), ((20, 8), (20, 8))),
    "symmetric": (lambda q, k: ops.info_nce(q, k, temperature=2.0, symmetric=True), ((20, 8), (20, 8))),
    "negatives": (lambda q, k, n: ops.info_nce(q, k, temperature=1.0, negatives=n), ((20, 8), (20, 8), (7, 8))),
    "n_pairs": (lambda q, k: ops.n_pairs(q, k), ((20, 8), (20, 8))),
    "nca": (lambda e: ops.nca(e, LABELS), ((30, 8),)),
}


@every_row(("name", "dtype"), list(itertools.product(LOSSES, DTYPES)))
def test_losses(name, dtype):
    loss, shapes = LOSSES[name]
    narrow, wide = rounded(dtype, *shapes)
    found, wanted = loss(*narrow), loss(*wide)
    assert found.dtype == torch.float32
    assert error(found, wanted) <= 20 * SINGLE
    assert_gradients([found], [wanted], narrow, wide, torch.finfo(dtype).eps + 20 * SINGLE)


def test_a_precision_that_is_lost_is_noticed():
    """What these tests would say of scores that went through bfloat16."""
    (query, key), (wide, other) = rounded(torch.bfloat16, (1, 4, 12, 8), (1, 2, 10, 8))
    coarse = (query @ key.repeat_interleave(2, 1).mT * 8**-0.5).float().logsumexp(-1)
    assert error(coarse, explicit.attention(wide, other, other)[1]) > 20 * SINGLE


@pytest.mark.parametrize(("backend", "exponential"), [("fused", FAST_EXPONENTIAL), ("reference", 0.0)])
def test_log_z_in_half_precision_where_one_exponential_decides(backend, exponential):
    """One key of score 0 and 255 of score −gap: the exponential's error at each gap is log Z's."""
    gaps = torch.arange(512).div(256).to(torch.float16)
    key = -gaps.view(512, 1, 1, 1).expand(512, 1, 256, 1).contiguous()
    key[:, :, 0] = 0
    query = torch.ones(512, 1, 1, 1, dtype=torch.float16)
    found = ops.log_partition(query, key, scale=1.0, backend=backend).flatten().double()
    wanted = torch.log1p(255 * torch.exp(-gaps.double()))
    assert (found - wanted).abs().max() <= exponential + 4 * SINGLE * wanted.max()
