"""Bugs of other packages, each with its number in the test's name; 8 is with trap 15, 18 with what is sharded."""

import math

import pytest
import torch
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.rows import every_row
from torch.func import grad, hessian, jvp

from massieu import ops
from massieu.ops import AtomBlock, AtomStore, FalseNegatives, Partial, streaming

BACKENDS = ["reference", "fused"]
close = torch.testing.assert_close


def far_scores():
    """Whole scores ±10⁴ and near them, ties among them."""
    query = torch.tensor([[100.0, 0.0], [-100.0, 0.0], [0.0, 100.0], [0.0, 0.0]])
    key = torch.tensor([[100.0, 1.0], [100.0, -1.0], [-100.0, 1.0], [-100.0, -1.0], [0.0, 100.0]])
    return query[None, None], key[None, None]


@every_row("dtype", [torch.float32, torch.float64])
@every_row("backend", BACKENDS)
def test_bug_5_scores_of_ten_thousand_have_finite_right_derivatives_of_both_orders(backend, dtype):
    query, key = (tensor.to(dtype).requires_grad_() for tensor in far_scores())
    value = draw(1, 1, 5, 3, dtype=dtype).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]

    def derivatives(results, leaves):
        loss = sum(result.sum() for result in results) + results[0].square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        along = sum((one * draw(*one.shape, seed=n).to(one.dtype)).sum() for n, one in enumerate(first))
        return [*results, *first, *torch.autograd.grad(along, leaves)]

    found = derivatives(ops.attention(query, key, value, scale=1.0, backend=backend), (query, key, value))
    wanted = derivatives(explicit.attention(*exact, scale=1.0), exact)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        # log Z of 10⁴ is rounded to 5e-4 in float32, and so are weights formed with it.
        bound = (1e-3 if dtype == torch.float32 else 1e-11) * max(1.0, float(other.detach().abs().max()))
        close(one.double(), other, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bug_5_so_have_the_losses_and_the_moments(dtype):
    query, key = (tensor[0, 0].to(dtype).requires_grad_() for tensor in far_scores())
    ids = torch.tensor([0, 1, 2, 3])
    functions = {
        "info_nce": lambda: ops.info_nce(query, key[:4], temperature=1.0, symmetric=True, return_log_partition=True),
        "ids": lambda: [ops.info_nce(query, key[:4], temperature=0.01, log_weight=FalseNegatives(ids // 2))],
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(
            query, key, ids, label_smoothing=0.1, return_log_partition=True
        ),
        "nca": lambda: [ops.nca(key, torch.tensor([0, 0, 1, 1, 0]))],
        "attention_moments": lambda: ops.attention_moments(query[None, None], key[None, None], scale=1.0)[1:],
        "fisher_vp": lambda: [ops.fisher_vp(query[None, None], key[None, None], query[None, None].detach(), scale=1.0)],
    }
    for name, function in functions.items():
        results = function()
        assert all(result.isfinite().all() for result in results), name
        leaves = (key,) if name == "nca" else (query, key)
        first = torch.autograd.grad(sum(result.sum() for result in results), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.sin().sum() for one in first), leaves)
        assert all(one.isfinite().all() for one in (*first, *second)), name


@every_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_row("backend", BACKENDS)
def test_bug_6_second_derivatives_are_right_in_every_precision(backend, dtype):
    """The Hessian of log Z in the query is scale²·Cov(keys)."""
    query, key = draw(3, 4, dtype=dtype), draw(7, 4, seed=1, dtype=dtype)
    found = hessian(lambda q: ops.log_partition(q[None, None], key[None, None], scale=0.5, backend=backend).sum())(
        query
    )
    p = torch.softmax(0.5 * query.double() @ key.double().mT, -1)
    centred = key.double() - (p @ key.double()).unsqueeze(1)
    wanted = 0.25 * torch.einsum("ln,lni,lnj->lij", p, centred, centred)
    bound = 1e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for row in range(3):
        close(found[row, :, row].double(), wanted[row], rtol=0, atol=bound)
        assert (found[row, :, (row + 1) % 3] == 0).all()


def test_bug_6_where_there_is_no_derivative_it_is_refused():
    query, key = draw(1, 1, 3, 4).requires_grad_(), draw(1, 1, 5, 4)
    for function, options in (
        (ops.attention_moments, {"backend": "blocks"}),
        (ops.fisher_vp, {"vector": query.detach(), "backend": "blocks"}),
        (ops.attention, {"value": key, "log_weight": draw(3, 5).requires_grad_(), "backend": "fused"}),
    ):
        with pytest.raises(ValueError, match="'reference' can"):
            function(query, key, **options)
    sample = ops.resample_attention(query, key, key, generator=torch.Generator()).sample
    assert not sample.requires_grad  # constant in the query, and never a gradient of 0 that would be believed


def test_bug_9_a_scale_may_be_of_any_form_and_trains():
    query, key, value = draw(2, 4, 3, 5), draw(2, 2, 7, 5, seed=1), draw(2, 2, 7, 2, seed=2)
    wanted = explicit.attention(query, key, value, scale=2.0)
    number = torch.tensor(2.0)
    for scale in (2, 2.0, number, number.double(), torch.nn.Parameter(number.view(1)), number.expand(4)):
        for one, other in zip(ops.attention(query, key, value, scale=scale), wanted, strict=True):
            close(one, other)
    scale = torch.nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
    ops.log_partition(query, key, scale=scale).sum().backward()
    scores = torch.einsum("bhld,bhnd->bhln", query, key.repeat_interleave(2, 1))
    close(scale.grad, (torch.softmax(2 * scores, -1) * scores).sum().view(1))


def test_bug_16_logarithms_are_natural(tmp_path):
    """n equal scores: log Z = ln n, and entropies and losses too."""
    query, key = torch.zeros(1, 1, 2, 4), draw(1, 1, 12, 4, dtype=torch.float32)
    natural = torch.full((1, 1, 2), math.log(12))
    store = AtomStore.write(tmp_path / "store", [AtomBlock(key[0])])
    moments = ops.attention_moments(query, key)
    found = [
        *(ops.log_partition(query, key, backend=backend) for backend in BACKENDS),
        *(ops.attention(query, key, key, backend=backend).log_partition for backend in BACKENDS),
        *(moments.log_partition, moments.entropy, moments.prior_log_partition),
        streaming.log_partition(query, store, block_size=5),
        streaming.attention(query, store, block_size=5).log_partition,
        ops.random_feature_log_partition(query, 0 * key, generator=torch.Generator(), features=3).log_partition,
    ]
    for one in found:
        close(one, natural)
    assert math.isclose(
        ops.linear_cross_entropy(query[0, 0], key[0, 0], torch.tensor([3, 5])), math.log(12), rel_tol=1e-6
    )
    assert math.isclose(ops.info_nce(torch.zeros(12, 4), key[0, 0], temperature=0.1), math.log(12), rel_tol=1e-6)
    assert math.isclose(ops.nca(torch.zeros(12, 4), torch.arange(12) // 2), math.log(11), rel_tol=1e-6)


@every_row("backend", BACKENDS)
@every_row("height", [-1e4, -50.0, -1.0, 0.0, 3.0, 1e4])
def test_bug_17_a_sink_is_not_the_one_that_is_added_after_the_maximum_is_taken_out(height, backend):
    """Scores all at one height: the slot's share is 1/(1 + n·exp(height)), and not 1/(1 + n)."""
    query, key = torch.full((1, 1, 1, 1), height, dtype=torch.float64), torch.ones(1, 1, 3, 1, dtype=torch.float64)
    value = draw(1, 1, 3, 2)
    kept = 1 / (1 + math.exp(min(700.0, -height)) / 3)
    slot = Partial(torch.zeros(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, 2, dtype=torch.float64))
    merged = Partial.of(ops.attention(query, key, value, scale=1.0, backend=backend)).merge(slot)
    found = ops.attention(query, key, value, scale=1.0, sink=0.0, backend=backend)
    level = max(height + math.log(3), 0.0) + math.log1p(math.exp(-abs(height + math.log(3))))
    for output, log_z in (found, (merged.mean, merged.log_partition)):
        close(output[0, 0, 0], kept * value[0, 0].mean(0), rtol=1e-12, atol=1e-300)
        close(log_z, torch.full((1, 1, 1), level, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_bug_6_a_word_that_is_hidden_costs_no_derivative_of_any_order():
    """A padding word of bias −inf, and tokens that are ignored: as if neither were there, three times forwards too."""
    hidden, weight = draw(3, 4), draw(6, 4, seed=1)
    bias = draw(6, seed=2)
    bias[0] = -math.inf
    target = torch.tensor([2, -100, 4])
    line = draw(3, 4, seed=3)

    def found(step):
        loss, level = ops.linear_cross_entropy(
            hidden + step * line, weight, target, bias=bias, reduction="sum", return_log_partition=True
        )
        return loss + level.sum()

    def wanted(step):
        scores = (hidden + step * line) @ weight[1:].mT + bias[1:]
        level = torch.logsumexp(scores, -1)
        return 2 * level[0] + level[1] + 2 * level[2] - scores[0, 1] - scores[2, 3]

    step = torch.zeros((), dtype=torch.float64)
    for derive in (lambda f: f, grad, lambda f: grad(grad(f)), hessian, along, lambda f: along(along(along(f)))):
        close(derive(found)(step), derive(wanted)(step))


def along(function):
    return lambda step: jvp(function, (step,), (torch.ones_like(step),))[1]
