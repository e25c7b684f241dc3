"""`massieu.nn.ConditionalMeanHeads` against scikit-learn's ridge within each head, masks, training."""

import numpy as np
import pytest
import torch
from tests.support.rows import every_row
from torch import nn

from massieu.nn import Attention, ConditionalMeanHeads, SoftmaxHeads


def module(**options):
    torch.manual_seed(0)
    return Attention(8, 2, batch_first=True, dtype=torch.float64, heads=ConditionalMeanHeads(**options))


def inputs(batch=2):
    torch.manual_seed(1)
    return [torch.randn(batch, count, 8, dtype=torch.float64) for count in (4, 11, 11)]


def heads(made, *tensors):
    return [
        (tensor @ weight.T).unflatten(-1, (2, -1)).transpose(1, 2).detach()
        for tensor, weight in zip(tensors, made.in_proj_weight.chunk(3), strict=True)
    ]


@pytest.mark.parametrize("need_weights", [False, True])
def test_padding_may_hold_anything(need_weights):
    made = module()
    query, key, value = inputs()
    padding = torch.arange(11).expand(2, -1) >= torch.tensor([[9], [7]])
    clean, *_ = made(query, key, value, padding, need_weights=need_weights)
    key, value = (torch.where(padding.unsqueeze(-1), torch.nan, tensor) for tensor in (key, value))
    output, *_ = made(query, key, value, padding, need_weights=need_weights)
    torch.testing.assert_close(output, clean, rtol=1e-12, atol=1e-12)


@every_row(
    ("kernel", "theirs"),
    [
        ("gaussian", {"kernel": "rbf", "gamma": 1 / (2 * 1.5**2)}),
        ("linear", {"kernel": "linear"}),
        ("exponential", {"kernel": lambda a, b: np.exp(a @ b / 1.5**2)}),
    ],
)
def test_each_head_is_a_regression_within_its_sequence(kernel, theirs):
    from sklearn.kernel_ridge import KernelRidge  # takes a second, so not while tests are collected

    made = module(kernel=kernel, ridge=0.4, **({} if kernel == "linear" else {"width": 1.5}))
    query, key, value = inputs()
    padding = torch.arange(11).expand(2, -1) >= torch.tensor([[9], [11]])
    output, weights, variance = made(query, key, value, padding, average_attn_weights=False, need_variance=True)
    q, k, v = heads(made, query, key, value)
    expected = torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    for item, head in np.ndindex(2, 2):
        seen = ~padding[item]
        model = KernelRidge(alpha=0.4, **theirs).fit(k[item, head, seen], v[item, head, seen])
        expected[item, head] = torch.from_numpy(model.predict(q[item, head]))
    merged = expected.transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, made.out_proj(merged), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(weights @ v, expected, rtol=1e-8, atol=1e-8)
    assert (weights[0, :, :, 9:] == 0).all()
    assert variance.shape == (2, 2, 4)
    assert (variance > 0).all()
    plain, nothing = made(query, key, value, padding, need_weights=False)
    assert nothing is None
    torch.testing.assert_close(plain, output)


def test_causal_outputs_do_not_see_the_future():
    made = module()
    _, tokens, _ = inputs()
    output = made(tokens, tokens, tokens, need_weights=False, is_causal=True)[0]
    changed = tokens.clone()
    changed[:, 7:] += 1
    other = made(changed, changed, changed, is_causal=True)[0]
    torch.testing.assert_close(other[:, :7], output[:, :7])
    assert not torch.allclose(other[:, 7:], output[:, 7:])


def test_layouts_and_rows_without_keys():
    made = module()
    arguments = inputs(1)
    batched = made(*arguments, need_weights=False, need_variance=True)
    single = made(*(tensor[0] for tensor in arguments), need_weights=False, need_variance=True)
    torch.testing.assert_close(single[0], batched[0][0])
    torch.testing.assert_close(single[2], batched[2][0])
    second = Attention(8, 2, dtype=torch.float64, heads=ConditionalMeanHeads())
    second.load_state_dict(made.state_dict())
    swapped = second(*(tensor.transpose(0, 1) for tensor in arguments), need_weights=False)[0]
    torch.testing.assert_close(swapped.transpose(0, 1), batched[0])
    hidden = made(*arguments, torch.ones(1, 11, dtype=torch.bool), need_variance=True)
    torch.testing.assert_close(hidden[0], made.out_proj.bias.expand(1, 4, 8))
    assert (hidden[2] == 1).all()


def test_state_dict_and_kinds_of_numbers():
    made = module(ridge=0.3, width=2.0)
    assert set(made.state_dict()) - set(Attention(8, 2).state_dict()) == {"heads.log_ridge", "heads.log_width"}
    torch.testing.assert_close(made.heads.ridge, torch.full((2,), 0.3, dtype=torch.float64))
    other = module()
    other.load_state_dict(made.state_dict())
    arguments = inputs()
    assert torch.equal(other(*arguments)[0], made(*arguments)[0])
    assert module(kernel="linear").heads.log_width is None
    made(*arguments)[0].sum().backward()
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_bfloat16():
    made = module().to(torch.bfloat16)
    arguments = [tensor.bfloat16() for tensor in inputs()]
    output, weights = made(*arguments)
    assert output.dtype == weights.dtype == torch.bfloat16
    exact = made.double()(*(tensor.double() for tensor in arguments))[0]
    torch.testing.assert_close(output.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_compiled():
    made, arguments = module(), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments)[0], made(*arguments)[0])


@every_row(
    ("options", "named"),
    [
        ({"kernel": "laplace"}, "kernel must be 'gaussian', 'exponential' or 'linear', got 'laplace'"),
        ({"kernel": "linear", "width": 1.0}, "the linear kernel has no width, got 1.0"),
        ({"width": 0.0}, "width must be positive and finite, got 0.0"),
        ({"ridge": -1.0}, "ridge must be positive and finite, got -1.0"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        module(**options)


def test_a_mask_of_pairs_is_refused():
    with pytest.raises(ValueError, match="does not support attn_mask: hiding keys from some queries alone"):
        module()(*inputs(), attn_mask=torch.zeros(4, 11, dtype=torch.bool))


def in_context_regression(count, generator):
    """Sixteen pairs (x, w·x + noise) of a w of each sequence, and four more to predict."""
    weight = torch.randn(count, 4, 1, generator=generator)
    points = torch.randn(count, 20, 4, generator=generator)
    values = points @ weight
    noisy = values + 0.1 * torch.randn(values.shape, generator=generator)
    query = torch.cat([points[:, 16:], torch.zeros(count, 4, 4)], -1)
    return query, points[:, :16], noisy[:, :16], values[:, 16:]


def trained(made):
    """Mean squared error on new sequences after 200 steps; without any fit it is 4."""
    generator = torch.Generator().manual_seed(0)
    out = nn.Linear(8, 1)
    optimiser = torch.optim.Adam([*made.parameters(), *out.parameters()], lr=1e-2)
    for _ in range(200):
        query, key, value, target = in_context_regression(32, generator)
        loss = (out(made(query, key, value, need_weights=False)[0]) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        query, key, value, target = in_context_regression(1000, generator)
        return (out(made(query, key, value, need_weights=False)[0]) - target).square().mean().item()


@pytest.mark.slow
def test_it_learns_in_context_regression_better_than_softmax_at_the_same_budget():
    sizes = {"kdim": 4, "vdim": 1, "batch_first": True}
    torch.manual_seed(0)
    softmax = trained(Attention(8, 2, heads=SoftmaxHeads(scale=nn.Parameter(torch.ones(2))), **sizes))
    linear = trained(Attention(8, 2, heads=ConditionalMeanHeads(kernel="linear"), **sizes))
    gaussian = trained(Attention(8, 2, heads=ConditionalMeanHeads(kernel="gaussian"), **sizes))
    print(f"softmax {softmax:.3f}, linear {linear:.3f}, gaussian {gaussian:.3f}")
    assert linear < 0.1 * softmax
    assert gaussian < 0.5 * softmax


def test_the_exponential_kernel_starts_from_attentions_scale():
    exponential = Attention(18, 2, heads=ConditionalMeanHeads(kernel="exponential")).heads.kernel
    torch.testing.assert_close(exponential.scale.detach(), torch.full((2,), 1 / 3))
    gaussian = Attention(18, 2, heads=ConditionalMeanHeads()).heads.kernel
    torch.testing.assert_close(gaussian.lengthscale.detach(), torch.full((2,), 3.0))
