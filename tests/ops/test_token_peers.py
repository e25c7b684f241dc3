"""What went wrong in other implementations of token statistics and divergences, each as a test."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu import ops

HIDDEN = -torch.inf


def _logits(*rows, dtype=torch.float32):
    """Hidden states and a head of which the logits are these."""
    table = torch.tensor(rows, dtype=dtype)
    return table.requires_grad_(), torch.eye(table.shape[1], dtype=dtype)


@every_row(
    ("logits", "dtype", "entropy"),
    [
        ((0.0, HIDDEN), torch.float32, 0.0),
        ((0.0, 0.0, HIDDEN), torch.float32, math.log(2)),
        ((65504.0, -65504.0), torch.float16, 0.0),
    ],
)
def test_words_of_no_probability_add_nothing_to_entropy_or_gradient(logits, dtype, entropy):
    """TRL 7221: 0·−∞ made entropies NaN; 7252: cleaned values still had NaN gradients."""
    bias = torch.tensor(logits, dtype=dtype)
    shown = bias.masked_fill(bias == HIDDEN, 0.0)
    hidden, weight = _logits(shown.tolist(), dtype=dtype)
    found = ops.token_statistics(
        hidden, weight, torch.tensor([0]), bias=torch.where(bias == HIDDEN, HIDDEN, 0.0).to(dtype)
    )
    assert found.entropy.item() == pytest.approx(entropy, abs=1e-6)
    (gradient,) = torch.autograd.grad(found.entropy.sum() + found.log_probability.sum(), hidden)
    assert gradient.isfinite().all()


@every_row("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_log_probability_above_0_in_many_tiles(dtype):
    """verl 2656: a fused kernel returned log-probabilities up to 123 in training."""
    torch.manual_seed(0)
    hidden, weight = 8 * torch.randn(60, 32), torch.randn(3000, 32)
    hidden, weight, target = hidden.to(dtype), weight.to(dtype), torch.randint(3000, (60,))
    found = ops.token_statistics(hidden, weight, target)
    exact = torch.log_softmax(hidden.double() @ weight.double().mT, -1)
    assert (found.log_probability <= 0).all() and (found.entropy >= 0).all()
    size = (hidden.double() @ weight.double().mT).abs().amax() * torch.finfo(torch.float32).eps
    assert (found.log_probability - exact.gather(1, target[:, None]).squeeze(1)).abs().max() < 8 * size


def test_results_in_bfloat16_are_not_rounded_to_it():
    """verl's fused head returns bfloat16: a ratio of two policies of it moves in steps of 2⁻⁸ and more."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape).bfloat16() for shape in ((20, 16), (500, 16)))
    found = ops.token_statistics(hidden, weight, torch.zeros(20, dtype=torch.long))
    exact = torch.log_softmax(hidden.double() @ weight.double().mT, -1)
    assert found.log_probability.dtype == torch.float32
    assert (found.log_probability - exact[:, 0]).abs().max() < 1e-4 < 2**-8
    assert (found.entropy + (exact.exp() * exact).sum(-1)).abs().max() < 1e-4


def test_a_batch_of_prompts_alone_has_gradients_of_0():
    """TRL 3700: nothing but masked tokens; a mean over none of them would be NaN."""
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    found = ops.token_statistics(hidden, weight, torch.full((3,), -100))
    for gradient in torch.autograd.grad(found.log_probability.sum() + found.entropy.sum(), (hidden, weight)):
        assert (gradient == 0).all()


def test_divergences_of_a_policy_after_one_step():
    """A difference of two means, as TRL's chunked divergence takes, has hardly a digit left here."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(32, 64), torch.randn(2000, 64) / 8
    step = weight + 1e-3 * torch.randn_like(weight) / 8
    log_p, log_q = (torch.log_softmax(hidden.double() @ head.double().mT, -1) for head in (weight, step))
    exact = (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)
    for one, other in zip(ops.token_divergence(hidden, weight, hidden, step), exact, strict=True):
        assert (one > 0).all()
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=0)
    p, q = (torch.log_softmax(hidden @ head.mT, -1) for head in (weight, step))
    textbook = (p.exp() * p).sum(-1) - (p.exp() * q).sum(-1)
    assert ((textbook - exact[0]) / exact[0]).abs().max() > 0.05


def test_a_word_hidden_in_both_policies_keeps_divergences_and_gradients_finite():
    """TRL's chunked divergence subtracts −∞ from −∞."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((3, 4), (9, 4), (3, 5), (9, 5))]
    bias = torch.zeros(9).index_fill_(0, torch.tensor([2, 7]), HIDDEN)
    found = ops.token_divergence(*tensors, bias=bias, other_bias=bias)
    gradients = torch.autograd.grad(found.divergence.sum() + found.reverse_divergence.sum(), tensors)
    assert all(part.isfinite().all() for part in (*found, *gradients))
    assert all((gradients[place][[2, 7]] == 0).all() for place in (1, 3))
