"""Draws by attention's weights against the weights written out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu import ops
from massieu.ops import reference
from massieu.ops.resampling import resample_attention

METHODS = ["multinomial", "systematic"]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def problem(length=3, keys=6, dtype=torch.float64):
    shapes = [(2, 4, length, 5), (2, 2, keys, 5), (2, 2, keys, 3)]
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def weights_of(query, key, keep=None):
    scores = query @ key.repeat_interleave(2, 1).mT / query.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    return scores.softmax(-1)


def counts_of(indices, keys):
    return torch.nn.functional.one_hot(indices, keys).sum(-2)


@pytest.mark.parametrize("method", METHODS)
def test_draws_are_values_of_the_keys_that_were_drawn(method):
    query, key, value = problem()
    found = resample_attention(query, key, value, generator=seeded(), draws=7, method=method)
    assert found.sample.shape == (2, 4, 3, 7, 3) and found.indices.shape == (2, 4, 3, 7)
    heads = value.repeat_interleave(2, 1)
    expected = torch.stack([heads[b, h][found.indices[b, h]] for b in range(2) for h in range(4)]).view(2, 4, 3, 7, 3)
    assert torch.equal(found.sample, expected)


def test_effective_sizes_and_offspring():
    query, key, value = problem()
    p = weights_of(query, key)
    found = resample_attention(query, key, value, generator=seeded())
    torch.testing.assert_close(found.effective_size, 1 / p.square().sum(-1), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found.offspring, p.sum(-2), atol=1e-12, rtol=1e-12)
    perplexity = torch.exp(-(p * p.log()).sum(-1))
    assert (found.effective_size >= 1 - 1e-12).all() and (found.effective_size <= perplexity + 1e-12).all()
    five = resample_attention(query.unflatten(1, (2, 2)), key, value, generator=seeded())
    assert torch.equal(five.offspring, found.offspring.unflatten(1, (2, 2)))
    assert torch.equal(five.sample, found.sample.unflatten(1, (2, 2)))


@pytest.mark.parametrize("method", METHODS)
def test_mean_and_covariance(method):
    """Attention and Cov_P(value) in standard errors, over independent items: those of one item are not, if systematic."""
    query, key, value = (tensor[:1] for tensor in problem(length=4))
    generator, calls = seeded(1), 4000
    many = [tensor.expand(calls, -1, -1, -1) for tensor in (query, key, value)]
    sample = resample_attention(*many, generator=generator, draws=2, method=method).sample[:, :, :, 1]
    mean = ops.attention(query, key, value).output[0]
    error = sample.std(0) / calls**0.5
    assert ((sample.mean(0) - mean).abs() / error).max() < 5
    p, v = weights_of(query, key)[0], value.repeat_interleave(2, 1)[0]
    centred = v.unsqueeze(1) - mean.unsqueeze(2)
    covariance = torch.einsum("hln,hlne,hlnf->hlef", p, centred, centred)
    products = torch.einsum("bhle,bhlf->bhlef", sample - mean, sample - mean)
    error = products.std(0) / calls**0.5
    assert ((products.mean(0) - covariance).abs() / error).max() < 5


def test_the_covariance_is_the_derivative_of_attention():
    """Cov_P(k) = β⁻¹ ∂ out/∂q for values = keys."""
    query, key, _ = (tensor[:1] for tensor in problem(length=1))
    slope = torch.func.jacrev(lambda q: ops.attention(q, key, key, scale=0.7).output)(query)
    p = (0.7 * query @ key.repeat_interleave(2, 1).mT).softmax(-1)
    k = key.repeat_interleave(2, 1)
    covariance = torch.einsum("bhln,bhne,bhnf->bhlef", p, k, k)
    mean = p @ k
    covariance -= torch.einsum("bhle,bhlf->bhlef", mean, mean)
    for head in range(4):
        torch.testing.assert_close(
            slope[0, head, 0, :, 0, head, 0] / 0.7, covariance[0, head, 0], atol=1e-12, rtol=1e-12
        )


def test_systematic_counts_are_rounded_up_or_down():
    query, key, value = problem(length=5, keys=8)
    expected = 16 * weights_of(query, key)
    for seed in range(5):
        found = resample_attention(query, key, value, generator=seeded(seed), draws=16, method="systematic")
        counts = counts_of(found.indices, 8)
        assert (counts >= (expected - 1e-9).floor()).all() and (counts <= (expected + 1e-9).ceil()).all()


def test_queries_that_are_alike_are_resampled_together():
    """Particles of one target: the classical systematic resampling, over all queries of a head."""
    query, key, value = problem(length=12, keys=5)
    query = query[:, :, :1].expand(-1, -1, 12, -1)
    expected = resample_attention(query, key, value, generator=seeded()).offspring
    for seed in range(5):
        found = resample_attention(query, key, value, generator=seeded(seed), method="systematic")
        counts = counts_of(found.indices.flatten(-2), 5)
        assert (counts >= (expected - 1e-9).floor()).all() and (counts <= (expected + 1e-9).ceil()).all()


@pytest.mark.parametrize("method", METHODS)
def test_hidden_keys_are_never_drawn(method):
    query, key, value = problem()
    keep = torch.rand(2, 4, 3, 6, generator=seeded(3)) > 0.5
    keep[0, 0, 1] = False
    found = resample_attention(query, key, value, generator=seeded(), draws=50, method=method, log_weight=keep)
    drawn = torch.gather(keep, 3, found.indices.clamp_min(0))
    sees = keep.any(-1)
    assert drawn[sees].all()
    assert (found.indices[~sees] == -1).all() and (found.sample[~sees] == 0).all()
    assert (found.effective_size[~sees] == 0).all()
    causal = resample_attention(query, key, value, generator=seeded(), draws=50, method=method, is_causal=True)
    assert (causal.indices <= torch.arange(3).view(3, 1)).all()
    torch.testing.assert_close(causal.effective_size[:, :, 0], torch.ones(2, 4, dtype=torch.float64))


@given(length=st.integers(0, 4), keys=st.integers(0, 4), draws=st.integers(1, 3), method=st.sampled_from(METHODS))
def test_small_shapes(length, keys, draws, method):
    query, key, value = problem(length, keys)
    found = resample_attention(query, key, value, generator=seeded(), draws=draws, method=method)
    assert found.sample.shape == (2, 4, length, draws, 3) and found.offspring.shape == (2, 4, keys)
    assert ((found.indices >= (0 if keys else -1)) & (found.indices < max(keys, 0))).all()


def test_blocks_of_queries(monkeypatch):
    query, key, value = problem(length=9)
    whole = resample_attention(query, key, value, generator=seeded(), draws=3)
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 100)
    blocks = resample_attention(query, key, value, generator=seeded(), draws=3)
    assert torch.equal(blocks.indices, whole.indices)
    torch.testing.assert_close(blocks.offspring, whole.offspring)


def test_the_values_have_a_gradient():
    query, key, value = problem()
    value.requires_grad_()
    found = resample_attention(query.requires_grad_(), key, value, generator=seeded(), draws=2)
    found.sample.sum().backward()
    expected = counts_of(found.indices.unflatten(1, (2, 2)).flatten(2), 6)
    assert torch.equal(value.grad, expected.unsqueeze(-1).expand_as(value).double())
    assert query.grad is None


def test_half_precision_and_extreme_scores():
    query, key, value = problem(dtype=torch.bfloat16)
    found = resample_attention(query * 1e4, key, value, generator=seeded(), draws=4)
    assert found.sample.dtype == torch.bfloat16 and found.offspring.dtype == torch.float32
    best = (query.float() @ key.float().repeat_interleave(2, 1).mT).argmax(-1, keepdim=True)
    assert (found.indices == best).all()


def test_uniform_numbers_at_the_end_of_their_range(monkeypatch):
    query, key, value = problem(dtype=torch.float32)
    largest = math.nextafter(1.0, 0.0)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, largest, dtype=torch.float64))
    keep = torch.ones(6, dtype=torch.bool)
    keep[4:] = False
    found = resample_attention(query, key, value, generator=seeded(), log_weight=keep)
    assert (found.indices == 3).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("method", METHODS)
def test_vmap(method):
    """randomness="same": each item as it would be alone; "different": draws of its own by the same weights."""
    query, key, value = problem()
    queries, values = torch.stack([query, -query, 2 * query]), torch.stack([value, value + 1, -value])

    def call(query, value):
        return tuple(resample_attention(query, key, value, generator=seeded(5), draws=4, method=method))

    found = torch.func.vmap(call, randomness="same")(queries, values)
    other = torch.func.vmap(call, randomness="different")(queries[:1].expand_as(queries), values)
    for item in range(3):
        for part, wanted in zip(found, call(queries[item], values[item]), strict=True):
            torch.testing.assert_close(part[item], wanted, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(other[2][item], found[2][0], atol=1e-12, rtol=1e-12)
    assert not torch.equal(other[1][0], other[1][1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(queries, values)


@pytest.mark.slow
def test_compiled_around_it():
    torch._dynamo.reset()
    query, key, value = problem()
    generator = seeded()

    def step(value):
        return 2 * resample_attention(query, key, 2 * value, generator=generator, draws=4).sample + 1

    found = torch.compile(step, backend="aot_eager")(value)
    generator.manual_seed(0)
    assert torch.equal(found, step(value))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="resample_attention cannot be compiled"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(value)


def test_autocast_changes_nothing():
    query, key, value = (tensor.float() for tensor in problem())
    wanted = resample_attention(query, key, value, generator=seeded(5), draws=4)
    with torch.autocast("cpu", torch.bfloat16):
        found = resample_attention(query, key, value, generator=seeded(5), draws=4)
    for part, right in zip(found, wanted, strict=True):
        assert torch.equal(part, right) and part.dtype == right.dtype


GOOD = dict(zip(("query", "key", "value"), problem(), strict=True)) | {"generator": seeded()}
BAD = {
    "generator": ({"generator": None}, TypeError, "generator must be a torch.Generator, got None"),
    "no draws": ({"draws": 0}, ValueError, "draws must be a whole number, at least 1, got 0"),
    "half a draw": ({"draws": 0.5}, TypeError, "draws must be a whole number, got 0.5"),
    "method": ({"method": "residual"}, ValueError, "method must be 'multinomial' or 'systematic', got 'residual'"),
    "no values": ({"value": None}, TypeError, "value must be a tensor, got None"),
    "shapes": ({"value": draw(2, 2, 5, 3)}, ValueError, r"got \(2, 2, 5, 3\) for key \(2, 2, 6, 5\)"),
}


@every_row(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_calls(change, error, message):
    with pytest.raises(error, match=message):
        resample_attention(**(GOOD | change))
