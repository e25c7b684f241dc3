"""A sink with a value is a prior token (X4)."""

import pytest
import torch

from massieu import ops
from massieu.posteriors import attention_with_prior


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


QUERY, KEY, VALUE = draw(2, 4, 5, 3), draw(2, 2, 7, 3, seed=1), draw(2, 2, 7, 6, seed=2)
PRIOR, STRENGTH = draw(4, 6, seed=3), draw(4, seed=4)


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention_with_one_more_token(causal):
    bias = draw(2, 1, 5, 7, seed=5)
    found = attention_with_prior(
        QUERY, KEY, VALUE, prior_value=PRIOR, log_strength=STRENGTH, log_weight=bias, scale=0.7, is_causal=causal
    )
    key, value = KEY.repeat_interleave(2, 1), VALUE.repeat_interleave(2, 1)
    key = torch.cat([torch.zeros(2, 4, 1, 3).double(), key], 2)
    value = torch.cat([PRIOR.expand(2, 4, 6).unsqueeze(2), value], 2)
    score = 0.7 * QUERY @ key.mT
    score[..., 0] += STRENGTH[:, None]
    score[..., 1:] += bias
    if causal:
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
        score[..., 1:] = score[..., 1:].masked_fill(hidden, -torch.inf)
    weights = score.softmax(-1)
    torch.testing.assert_close(found.output, weights @ value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_partition, score.logsumexp(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.prior_share, weights[..., 0], rtol=1e-12, atol=1e-12)


def test_of_value_zero_it_is_the_sink():
    found = attention_with_prior(QUERY, KEY, VALUE, prior_value=0 * PRIOR[0], log_strength=STRENGTH)
    plain = ops.attention(QUERY, KEY, VALUE, sink=STRENGTH)
    torch.testing.assert_close(found.output, plain.output, rtol=0, atol=1e-14)


def test_a_query_that_sees_nothing_has_the_prior():
    seen = torch.zeros(7, dtype=torch.bool)
    found = attention_with_prior(QUERY, KEY, VALUE, prior_value=PRIOR, log_strength=STRENGTH, log_weight=seen)
    torch.testing.assert_close(found.output, PRIOR.unsqueeze(1).expand(2, 4, 5, 6), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.prior_share, torch.ones(2, 4, 5).double(), rtol=1e-12, atol=0)


def test_with_a_value_it_is_no_gradient_in_the_query():
    """Trap 12: with values = keys a sink at the origin keeps ∇ log Z; a prior value is not its key, and there is no energy."""
    key = KEY[:1, :1]

    def jacobian(prior):
        def output(query):
            found = attention_with_prior(
                query.reshape(1, 1, 1, 3), key, key, prior_value=prior, log_strength=STRENGTH[0] + 4, scale=1.0
            )
            return found.output.flatten()

        return torch.func.jacrev(output)(QUERY[0, 0, 0])

    plain, pulled = jacobian(torch.zeros(3, dtype=torch.float64)), jacobian(PRIOR[0, :3])
    torch.testing.assert_close(plain, plain.T, rtol=0, atol=1e-14)
    assert (pulled - pulled.T).abs().max() > 0.01


@pytest.mark.medium
def test_its_derivatives():
    def both(query, key, value, prior, strength):
        return attention_with_prior(query, key, value, prior_value=prior, log_strength=strength)[:3]

    inputs = [part[:1, :, :2, :2].clone() for part in (QUERY, KEY, VALUE)] + [PRIOR[:, :2].clone(), STRENGTH.clone()]
    inputs = [part.requires_grad_() for part in inputs]
    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradgradcheck(both, inputs)


@pytest.mark.medium
def test_compiled_and_in_half_precision():
    def plain(query, key, value):
        return attention_with_prior(query, key, value, prior_value=PRIOR, log_strength=STRENGTH).output

    torch.compiler.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(QUERY, KEY, VALUE), plain(QUERY, KEY, VALUE))
    half = [part.bfloat16() for part in (QUERY, KEY, VALUE)]
    found = attention_with_prior(*half, prior_value=PRIOR, log_strength=STRENGTH)
    assert found.output.dtype == torch.bfloat16
    assert found.log_partition.dtype == torch.float32
    torch.testing.assert_close(found.output.double(), plain(*[part.double() for part in half]), rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"query must have shape \(B, H, L, D\), got \(4, 5, 3\)"):
        attention_with_prior(QUERY[0], KEY, VALUE, prior_value=PRIOR, log_strength=STRENGTH)
    with pytest.raises(ValueError, match=r"prior_value must have shape \(6,\) or \(4, 6\), got \(2, 6\)"):
        attention_with_prior(QUERY, KEY, VALUE, prior_value=PRIOR[:2], log_strength=STRENGTH)
    with pytest.raises(ValueError, match=r"log_strength must have shape \(\) or \(4,\), got \(3,\)"):
        attention_with_prior(QUERY, KEY, VALUE, prior_value=PRIOR, log_strength=STRENGTH[:3])
    with pytest.raises(ValueError, match="log_strength must be finite"):
        attention_with_prior(QUERY, KEY, VALUE, prior_value=PRIOR, log_strength=STRENGTH - torch.inf)
