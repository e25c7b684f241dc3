"""A sink with a value is one more key at the origin, with that value (X4): against the explicit softmax over N + 1 keys."""

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu import ops


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


QUERY, KEY, VALUE = draw(2, 4, 5, 3), draw(2, 2, 7, 3, seed=1), draw(2, 2, 7, 6, seed=2)
SINK_VALUE, SINK = draw(4, 6, seed=3), draw(4, seed=4)


@every_row("backend", ["auto", "reference"])
@every_row("causal", [False, True])
def test_it_is_attention_with_one_more_key(causal, backend):
    bias = draw(2, 1, 5, 7, seed=5)
    options = {"log_weight": bias, "scale": 0.7, "is_causal": causal, "sink": SINK}
    found = ops.attention(QUERY, KEY, VALUE, sink_value=SINK_VALUE, backend=backend, **options)
    key, value = KEY.repeat_interleave(2, 1), VALUE.repeat_interleave(2, 1)
    key = torch.cat([torch.zeros(2, 4, 1, 3).double(), key], 2)
    value = torch.cat([SINK_VALUE.expand(2, 4, 6).unsqueeze(2), value], 2)
    score = 0.7 * QUERY @ key.mT
    score[..., 0] += SINK[:, None]
    score[..., 1:] += bias
    if causal:
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
        score[..., 1:] = score[..., 1:].masked_fill(hidden, -torch.inf)
    weights = score.softmax(-1)
    torch.testing.assert_close(found.output, weights @ value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_partition, score.logsumexp(-1), rtol=1e-12, atol=1e-12)
    share = (SINK[:, None] - found.log_partition).exp()
    torch.testing.assert_close(share, weights[..., 0], rtol=1e-12, atol=1e-12)
    moments = ops.attention_moments(QUERY, KEY, VALUE, sink_value=SINK_VALUE, **options)
    torch.testing.assert_close(moments.output, found.output, rtol=1e-12, atol=1e-12)


def test_forms_of_a_value():
    """One for all, one a head, one a query; and for five-dimensional queries."""
    one = SINK_VALUE[0]
    wanted = ops.attention(QUERY, KEY, VALUE, sink=SINK, sink_value=one.expand(4, 6)).output
    for form in (one, one.expand(1, 1, 1, 6), one.expand(2, 4, 5, 6), one.expand(1, 4, 1, 6)):
        assert torch.equal(ops.attention(QUERY, KEY, VALUE, sink=SINK, sink_value=form).output, wanted)
    wanted = ops.attention(QUERY, KEY, VALUE, sink=SINK, sink_value=SINK_VALUE).output.unflatten(1, (2, 2))
    for form in (SINK_VALUE, SINK_VALUE.view(1, 2, 2, 1, 6)):
        found = ops.attention(QUERY.unflatten(1, (2, 2)), KEY, VALUE, sink=SINK, sink_value=form).output
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


def test_of_value_zero_it_is_the_sink():
    found = ops.attention(QUERY, KEY, VALUE, sink=SINK, sink_value=0 * SINK_VALUE[0])
    plain = ops.attention(QUERY, KEY, VALUE, sink=SINK)
    torch.testing.assert_close(found.output, plain.output, rtol=0, atol=1e-14)


def test_a_query_that_sees_nothing_has_its_value():
    seen = torch.zeros(7, dtype=torch.bool)
    found = ops.attention(QUERY, KEY, VALUE, sink=SINK, sink_value=SINK_VALUE, log_weight=seen)
    torch.testing.assert_close(found.output, SINK_VALUE.unsqueeze(1).expand(2, 4, 5, 6), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_partition, SINK[:, None].expand(2, 4, 5), rtol=0, atol=1e-14)
    none = ops.attention(QUERY, KEY, VALUE, sink=-torch.inf, sink_value=SINK_VALUE, log_weight=seen)
    assert (none.output == 0).all()
    assert (none.log_partition == -torch.inf).all()


def test_with_a_window():
    options = {"window": (1, 2), "sink": SINK, "sink_value": SINK_VALUE}
    long_query, long_key, long_value = draw(1, 4, 300, 3), draw(1, 2, 300, 3, seed=1), draw(1, 2, 300, 6, seed=2)
    distance = torch.arange(300) - torch.arange(300)[:, None]
    inside = (distance >= -1) & (distance <= 2)
    found = ops.attention(long_query, long_key, long_value, **options)
    del options["window"]
    wanted = ops.attention(long_query, long_key, long_value, log_weight=inside, **options)
    torch.testing.assert_close(found.output, wanted.output, rtol=1e-12, atol=1e-12)


def test_with_a_value_it_is_no_gradient_in_the_query():
    """Trap 12: with values = keys a sink at the origin keeps ∇ log Z; another value is not its key: there is no energy."""
    key = KEY[:1, :1]

    def jacobian(value):
        def output(query):
            query = query.reshape(1, 1, 1, 3)
            return ops.attention(query, key, key, sink_value=value, sink=SINK[0] + 4, scale=1.0).output.flatten()

        return torch.func.jacrev(output)(QUERY[0, 0, 0])

    plain, pulled = jacobian(torch.zeros(3, dtype=torch.float64)), jacobian(SINK_VALUE[0, :3])
    torch.testing.assert_close(plain, plain.T, rtol=0, atol=1e-14)
    assert (pulled - pulled.T).abs().max() > 0.01


@pytest.mark.medium
def test_its_derivatives():
    def both(query, key, value, sink_value, sink):
        return tuple(ops.attention(query, key, value, sink_value=sink_value, sink=sink))

    inputs = [part[:1, :, :2, :2].clone() for part in (QUERY, KEY, VALUE)] + [SINK_VALUE[:, :2].clone(), SINK.clone()]
    inputs = [part.requires_grad_() for part in inputs]
    check_derivatives(both, inputs)


def plain(query, key, value):
    return ops.attention(query, key, value, sink_value=SINK_VALUE, sink=SINK).output


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(QUERY, KEY, VALUE), plain(QUERY, KEY, VALUE))


def test_in_half_precision():
    half = [part.bfloat16() for part in (QUERY, KEY, VALUE)]
    found = ops.attention(*half, sink_value=SINK_VALUE, sink=SINK)
    assert found.output.dtype == torch.bfloat16
    assert found.log_partition.dtype == torch.float32
    torch.testing.assert_close(found.output.double(), plain(*[part.double() for part in half]), rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_raises():
    with pytest.raises(ValueError, match=r"sink_value must be of shape \(6,\), \(4, 6\) .* got shape \(2, 6\)"):
        ops.attention(QUERY, KEY, VALUE, sink_value=SINK_VALUE[:2], sink=SINK)
    with pytest.raises(ValueError, match=r"sink_value must be of shape \(6,\), .* got shape \(2, 4, 5, 1\)"):
        ops.attention(QUERY, KEY, VALUE, sink_value=QUERY[..., :1], sink=SINK)
    with pytest.raises(ValueError, match="sink_value needs a sink"):
        ops.attention(QUERY, KEY, VALUE, sink_value=SINK_VALUE)
    with pytest.raises(ValueError, match="and values of the keys"):
        ops.attention_moments(QUERY, KEY, sink_value=SINK_VALUE, sink=SINK)
    with pytest.raises(TypeError, match="sink_value must be a"):
        ops.attention(QUERY, KEY, VALUE, sink_value=0.0, sink=SINK)
    with pytest.raises(ValueError, match="one device"):
        ops.attention(QUERY, KEY, VALUE, sink_value=SINK_VALUE.to("meta"), sink=SINK)
