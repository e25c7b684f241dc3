"""Fisher information times a vector, against covariance matrices formed in float64 and differences of attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in

from massieu import ops
from massieu.ops import fisher, reference
from massieu.ops.tiles import Blocks

BACKENDS = ["reference", "blocks"]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(batch=2, heads=4, key_heads=2, length=7, keys=9, size=5, dtype=torch.float64):
    """Query, key and vector."""
    shapes = [(batch, heads, length, size), (batch, key_heads, keys, size), (batch, heads, length, size)]
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def visible_weights(log_weight, is_causal, shape):
    """Float64 log-weights of every pair, and whether it is visible."""
    weight = torch.zeros(shape, dtype=torch.float64)
    if log_weight is not None and log_weight.dtype == torch.bool:
        weight = weight.masked_fill(~log_weight, -math.inf)
    elif log_weight is not None:
        weight = weight + log_weight
    if is_causal:
        weight = weight.masked_fill(~torch.ones(shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return weight, weight > -math.inf


def covariance_times_vector(query, key, vector, log_weight=None, scale=None, is_causal=False):
    """Cov_p(key)·vector from the matrix of each query, in float64; 0 where no key is visible."""
    query, key, vector = query.double(), key.double(), vector.double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weight, visible = visible_weights(log_weight, is_causal, (*query.shape[:-1], key.shape[2]))
    some = visible.any(-1, keepdim=True)
    scores = torch.where(visible, query @ key.mT * scale + torch.where(visible, weight, 0.0), -math.inf)
    p = torch.where(visible, torch.softmax(torch.where(some, scores, 0.0), -1), 0.0)
    deviation = key.unsqueeze(2) - (p @ key).unsqueeze(3)
    covariance = (p.unsqueeze(-1) * deviation).mT @ deviation
    return (covariance @ vector.unsqueeze(-1)).squeeze(-1) * some


KEEP = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(3)) > 0.4
KEEP[0, 0, 2] = False  # one query sees nothing
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "no scale": {"scale": 0.0},
    "negative scale": {"scale": -1.3},
    "scale of heads": {"scale": draw(4, seed=4)},
    "scale of queries": {"scale": draw(2, 4, 7, 1, seed=4)},
    "booleans of keys": {"log_weight": KEEP[:, :, :1]},
    "booleans": {"log_weight": KEEP},
    "booleans of heads": {"log_weight": draw(2, 4, 7, 9, seed=5) > 0},
    "weights of keys": {"log_weight": draw(9, seed=6)},
    "weights of heads and keys": {"log_weight": draw(1, 4, 1, 9, seed=6)},
    "weights of queries": {"log_weight": draw(2, 1, 7, 1, seed=6)},
    "weights": {"log_weight": draw(2, 4, 7, 9, seed=6).masked_fill(~KEEP, -math.inf)},
    "booleans, causal": {"log_weight": KEEP, "is_causal": True},
    "weights of keys, causal": {"log_weight": draw(9, seed=6), "is_causal": True},
    "weights, causal, scale": {"log_weight": draw(2, 1, 7, 9, seed=6), "is_causal": True, "scale": 0.4},
    "nothing visible": {"log_weight": torch.zeros(9, dtype=torch.bool)},
}


def explicit(query, key, vector, **options):
    scale = options.get("scale")
    if isinstance(scale, torch.Tensor) and scale.ndim == 1:
        options["scale"] = scale.view(1, -1, 1, 1)
    return covariance_times_vector(query, key, vector, **options)


@one_in(2, {"backend": BACKENDS, "case": CASES})
def test_covariance_times_vector(case, backend, monkeypatch):
    arguments, options = tensors(), CASES[case]
    wanted = explicit(*arguments, **options)
    for pairs in (1 << 18, 20):
        monkeypatch.setattr(fisher, "PAIRS_PER_THREAD", pairs)
        monkeypatch.setattr(reference, "BLOCK_PAIRS", pairs)
        found = ops.fisher_vp(*arguments, backend=backend, **options)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.medium
@given(
    batch=st.integers(0, 3), key_heads=st.integers(1, 3), group=st.integers(1, 3), size=st.sampled_from([1, 3, 16]),
    length=st.sampled_from([0, 1, 2, 129, 131]), keys=st.sampled_from([0, 1, 2, 127, 150]), is_causal=st.booleans(),
    pairs=st.sampled_from([1, 500, 40_000]), mask=st.sampled_from(["none", "window", "any", "keys", "weights"]),
    backend=st.sampled_from(["auto", "reference"]),
)  # fmt: skip
def test_any_shape(batch, key_heads, group, size, length, keys, is_causal, pairs, mask, backend):
    arguments = tensors(batch, key_heads * group, key_heads, length, keys, size)
    rows, columns = torch.arange(length)[:, None], torch.arange(keys)
    log_weight = {
        "none": None,
        "window": (columns - rows).abs() < 40,
        "any": draw(batch, 1, length, keys) > 0,
        "keys": draw(batch, 1, 1, keys),
        "weights": draw(1, key_heads * group, length, keys).masked_fill(columns % 3 == 1, -math.inf),
    }[mask]
    before = fisher.PAIRS_PER_THREAD, reference.BLOCK_PAIRS
    fisher.PAIRS_PER_THREAD, reference.BLOCK_PAIRS = pairs, 20 * pairs
    try:
        found = ops.fisher_vp(*arguments, log_weight=log_weight, is_causal=is_causal, backend=backend)
    finally:
        fisher.PAIRS_PER_THREAD, reference.BLOCK_PAIRS = before
    assert found.shape == arguments[0].shape
    wanted = covariance_times_vector(*arguments, log_weight=log_weight, is_causal=is_causal) if keys else 0 * found
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_grouped_queries_in_five_dimensions():
    query, key, vector = tensors(heads=6)
    weight, scale = draw(2, 6, 7, 9, seed=4), draw(6, seed=5)
    wanted = explicit(query, key, vector, log_weight=weight, scale=scale)
    for backend in BACKENDS:
        found = ops.fisher_vp(
            query.unflatten(1, (2, 3)), key, vector.unflatten(1, (2, 3)),
            log_weight=weight.unflatten(1, (2, 3)), scale=scale, backend=backend,
        )  # fmt: skip
        assert found.shape == (2, 2, 3, 7, 5)
        torch.testing.assert_close(found.flatten(1, 2), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter(backend):
    arguments = tensors()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in arguments]
    columns = [t.mT.contiguous().mT for t in arguments]
    wanted = covariance_times_vector(*arguments)
    for given_ in (strided, columns):
        torch.testing.assert_close(ops.fisher_vp(*given_, backend=backend), wanted, rtol=0, atol=1e-12)


def test_central_differences_of_attention():
    """The derivative of the mean along the vector, in units of scale·query; the step's error is of fourth order."""
    query, key, vector = tensors()
    scale, step = 0.6, 1e-3

    def mean(steps):
        return ops.attention(query + steps * step / scale * vector, key, key, scale=scale, backend="reference").output

    slope = (8 * (mean(1) - mean(-1)) - (mean(2) - mean(-2))) / (12 * step)
    torch.testing.assert_close(ops.fisher_vp(query, key, vector, scale=scale), slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_symmetric_and_positive(backend):
    query, key, vector = tensors(dtype=torch.float32)
    other = draw(*query.shape, seed=8, dtype=torch.float32)
    one, two = (ops.fisher_vp(query, key, v, backend=backend) for v in (vector, other))
    torch.testing.assert_close((one * other).sum(-1), (two * vector).sum(-1), rtol=1e-5, atol=1e-5)
    assert ((one * vector).sum(-1) > 0).all()


@every_row("backend", BACKENDS)
@every_row("spread", [1.0, 30.0])
@every_row("offset", [0.0, 1000.0])
def test_float32_error_does_not_grow_with_the_distance_of_the_keys(offset, spread, backend):
    """The bound of the docstring with the keys' distance from their own mean, at most 8 here, not from the origin."""
    query, key, vector = tensors(1, 2, 2, 130, 200, 16, torch.float32)
    query, key = query * spread, key + offset
    wanted = covariance_times_vector(query, key, vector)
    found = ops.fisher_vp(query, key, vector, backend=backend)
    # The scores' own rounding moves p, by spread·16^½ units.
    bound = 2**-23 * (16 + 4 * spread) * vector.norm(dim=-1, keepdim=True) * 8 * key.std()
    assert ((found.double() - wanted).abs() <= bound).all()


@every_row("backend", BACKENDS)
@every_row("nats", [5.0, 15.0, 25.0])
def test_little_variance_keeps_its_digits(nats, backend):
    """Two keys, one of share e^-nats: p(1 − p)·difference·(difference·vector), to the accuracy of the scores."""
    key = torch.tensor([[3.0, 1.0, -2.0], [-1.0, 4.0, 0.5], [90.0, -50.0, 7.0]]).view(1, 1, 3, 3)
    query, vector = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 1, 3), torch.tensor([0.3, -1.0, 2.0]).view(1, 1, 1, 3)
    keep = torch.tensor([True, True, False])
    found = ops.fisher_vp(query, key, vector, log_weight=keep, scale=nats / 4, backend=backend).double()
    p, difference = 1 / (1 + math.exp(nats)), (key[..., 0, :] - key[..., 1, :]).double().flatten()
    wanted = p * (1 - p) * difference * (difference @ vector.double().flatten())
    torch.testing.assert_close(found.flatten(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_of_any_size_contribute_nothing(backend):
    """Hidden by booleans, by weights and, the last two of nine for seven queries, by causality."""
    query, key, vector = tensors(dtype=torch.float32)
    keep = torch.arange(9) % 3 > 0
    wanted = covariance_times_vector(query, key[:, :, keep], vector)
    key[:, :, ~keep] = 1e8
    pairs = keep & torch.ones(7, 1, dtype=torch.bool)
    for mask in (keep, pairs, torch.zeros(9).masked_fill(~keep, -math.inf), torch.where(pairs, 0.0, -math.inf)):
        found = ops.fisher_vp(query, key, vector, log_weight=mask, backend=backend)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    seen = torch.cat([key[:, :, keep], key[:, :, keep][:, :, :1], key[:, :, ~keep][:, :, :2]], dim=2)
    found = ops.fisher_vp(query, seen, vector, is_causal=True, backend=backend)
    wanted = covariance_times_vector(query, seen[:, :, :7], vector, is_causal=True)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@every_row("backend", BACKENDS)
@every_row("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, backend):
    arguments = tensors(dtype=dtype)
    arguments[1] = arguments[1] + 50
    found = ops.fisher_vp(*arguments, backend=backend)
    assert found.dtype == dtype
    wanted = covariance_times_vector(*arguments)
    # Only the result is rounded.
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_the_choice_of_backend(monkeypatch):
    arguments = [t.requires_grad_() for t in tensors()]
    with pytest.raises(ValueError, match="'blocks' cannot be used here: it has no derivative"):
        ops.fisher_vp(*arguments, backend="blocks")
    assert ops.fisher_vp(*arguments).requires_grad
    with torch.no_grad():
        calls = []
        blocks = Blocks(lambda problem, vector: calls.append(0) or (vector,))
        monkeypatch.setattr(fisher, "BACKENDS", (blocks, *fisher.BACKENDS[1:]))
        ops.fisher_vp(*arguments)
        assert calls


@pytest.fixture(params=["whole", "blocks"])
def block_pairs(request, monkeypatch):
    if request.param == "blocks":
        monkeypatch.setattr(reference, "BLOCK_PAIRS", 12)
    return request.param


@pytest.mark.medium
@pytest.mark.parametrize(("is_causal", "block_pairs"), [(False, "whole"), (True, "blocks")], indirect=["block_pairs"])
def test_derivatives_in_every_argument(is_causal, block_pairs):
    query, key, vector = (t.requires_grad_() for t in tensors(1, 2, 1, 3, 4, 2))
    weight, scale = draw(1, 2, 1, 4, seed=6).requires_grad_(), draw(2, seed=7).requires_grad_()

    def function(query, key, vector, weight, scale):
        return ops.fisher_vp(query, key, vector, log_weight=weight, scale=scale, is_causal=is_causal)

    check_derivatives(function, (query, key, vector, weight, scale), forward=True)


@pytest.mark.usefixtures("block_pairs")
def test_derivatives_with_weights_of_pairs_and_hidden_queries():
    arguments = [t.requires_grad_() for t in tensors(1, 2, 1, 3, 4, 2)]
    hidden = torch.tensor([[False, True, False, False], [True] * 4, [False, False, True, True]])
    weight = draw(1, 2, 3, 4, seed=6).requires_grad_()

    def function(query, key, vector, weight):
        return ops.fisher_vp(query, key, vector, log_weight=weight.masked_fill(hidden, -math.inf), scale=1.0)

    check_derivatives(function, (*arguments, weight))
    found = torch.autograd.grad(function(*arguments, weight).sum(), (*arguments, weight))
    assert (found[0][:, :, 1] == 0).all()
    assert (found[2][:, :, 1] == 0).all()


@pytest.mark.usefixtures("block_pairs")
def test_gradients_in_float32_are_those_of_the_covariance():
    arguments = [t.requires_grad_() for t in tensors(dtype=torch.float32)]
    cotangent = draw(*arguments[0].shape, seed=5)
    found = torch.autograd.grad(ops.fisher_vp(*arguments, log_weight=KEEP), arguments, cotangent.float())
    double = [t.detach().double().requires_grad_() for t in arguments]
    wanted = torch.autograd.grad(covariance_times_vector(*double, log_weight=KEEP), double, cotangent)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_vmap_over_every_argument(backend):
    query, key, vector = tensors()
    queries, keys = torch.stack([query, 2 * query, -query]), torch.stack([key, key + 1, -key], dim=1)
    weights = draw(3, 9, seed=6)

    def function(query, key, weight):
        return ops.fisher_vp(query, key, vector, log_weight=weight, backend=backend)

    mapped = torch.func.vmap(function, in_dims=(0, 1, 0))(queries, keys, weights)
    for item in range(3):
        wanted = covariance_times_vector(queries[item], keys[:, item], vector, log_weight=weights[item])
        torch.testing.assert_close(mapped[item], wanted, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("block_pairs")
def test_nested_transforms():
    """Along a line of etas, vᵀFv and its derivatives are the second to fourth cumulants of the slopes."""
    query, key, vector = tensors(1, 2, 2, 3, 6, 4)

    def variance(steps):
        moved = query + steps.unsqueeze(-1) * vector
        return (vector * ops.fisher_vp(moved, key, vector, scale=1.0)).sum(-1)

    def along(function):
        return lambda steps: torch.func.jvp(function, (steps,), (torch.ones_like(steps),))[1]

    zero = query.new_zeros(query.shape[:-1])
    p, slope = torch.softmax(query @ key.mT, -1), vector @ key.mT
    centred = slope - (p * slope).sum(-1, keepdim=True)
    second, third, fourth = ((p * centred**n).sum(-1) for n in (2, 3, 4))
    torch.testing.assert_close(variance(zero), second)
    torch.testing.assert_close(along(variance)(zero), third)
    torch.testing.assert_close(along(along(variance))(zero), fourth - 3 * second**2)
    total = torch.func.grad(lambda steps: along(variance)(steps).sum())(zero)
    torch.testing.assert_close(total, fourth - 3 * second**2)
    pulled = torch.func.vjp(lambda v: ops.fisher_vp(query, key, v), vector)[1](query)[0]
    torch.testing.assert_close(pulled, covariance_times_vector(query, key, query))


@pytest.mark.slow
def test_compiled():
    arguments = [t.requires_grad_() for t in tensors()]
    torch._dynamo.reset()
    compiled = torch.compile(ops.fisher_vp, backend="aot_eager", fullgraph=True)
    found, wanted = (function(*arguments) for function in (compiled, covariance_times_vector))
    torch.testing.assert_close(found, wanted)
    gradients = (torch.autograd.grad(result.sin().sum(), arguments) for result in (found, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)

    def slope(function):
        return lambda query, *rest: torch.func.grad(lambda query: function(query, *rest).sin().sum())(query)

    torch._dynamo.reset()
    found = torch.compile(slope(ops.fisher_vp), backend="aot_eager", fullgraph=True)(*(t.detach() for t in arguments))
    torch.testing.assert_close(found, slope(covariance_times_vector)(*(t.detach() for t in arguments)))


Q, K = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 7, 8)
WRONG = {
    "shape of vector": ((Q, K, Q[:, :, :4]), {}, ValueError, r"\(2, 4, 5, 8\), got \(2, 4, 4, 8\)"),
    "vector spelt out": ((Q, K, Q.unflatten(1, (2, 2))), {}, ValueError, r"\(2, 4, 5, 8\), got \(2, 2, 2, 5, 8\)"),
    "vector that would broadcast": ((Q, K, Q[:1]), {}, ValueError, r"vector must have .*got \(1, 4, 5, 8\)"),
    "vector of another dtype": ((Q, K, Q.double()), {}, TypeError, "float32 and torch.float64"),
    "list": ((Q, K, [1.0]), {}, TypeError, "vector must be a floating-point tensor, got list"),
    "device of vector": ((Q, K, Q.to("meta")), {}, ValueError, "on cpu and .* on meta"),
    "head sizes": ((Q, K[..., :6], Q), {}, ValueError, "8 in .* and 6 in"),
    "weight": ((Q, K, Q), {"log_weight": torch.ones(6)}, ValueError, r"\(2, 4, 5, 7\).*\(6,\)"),
    "scale": ((Q, K, Q), {"scale": torch.ones(3)}, ValueError, "4 .one a head.*3"),
    "backend": ((Q, K, Q), {"backend": "fused"}, ValueError, "'fused'"),
    "blocks without keys": ((Q, K[:, :, :0], Q), {"backend": "blocks"}, ValueError, "at least one query and one key"),
    "blocks elsewhere": ([t.to("meta") for t in (Q, K, Q)], {"backend": "blocks"}, ValueError, "meta.*'reference'"),
}


@every_row("name", WRONG)
def test_wrong_calls(name):
    arguments, options, error, words = WRONG[name]
    with pytest.raises(error, match=words) as caught:
        ops.fisher_vp(*arguments, **options)
    assert "\n" not in str(caught.value)
