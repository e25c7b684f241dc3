"""NaN in is NaN out, at every length: no query, key or weight that is not finite passes for a row without a key."""

import math

import pytest
import torch
from tests.support import needs
from tests.support.ops.explicit import draw
from tests.support.rows import every_row, one_in, some_slow

from massieu import ops
from massieu.energy import HopfieldEnergy
from massieu.measures import Atoms, affine, power
from massieu.ops import AtomBlock, AtomStore, Partial, cpu_kernel, streaming

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = [1, 3, 7, 8, 9, 15, 16, 17, 33]
VALUES = [math.nan, math.inf, -math.inf]
NO_KEY = -math.inf


def by_definition(query, key, value, log_weight=None, is_causal=False, window=None, sink=None):
    """Output and log Z of one head, in float64, from all scores; hidden ones have a log-weight of −∞ added."""
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    scores = scores if log_weight is None else scores + log_weight.double()
    ahead = torch.arange(scores.shape[1]) - torch.arange(len(scores))[:, None]
    left, right = (math.inf, 0 if is_causal else math.inf) if window is None else window
    scores, points = scores + torch.where((ahead >= -left) & (ahead <= right), 0.0, NO_KEY), value.double()
    if sink is not None:
        scores = torch.cat([scores, torch.full_like(scores[:, :1], sink)], -1)
        points = torch.cat([points, torch.zeros_like(points[:1])])
    # One score of +∞ leaves no law; −∞ alone are no keys.
    none, undefined = (scores == NO_KEY).all(-1), (scores == math.inf).any(-1)
    output = torch.softmax(scores.masked_fill(none[:, None], 0.0), -1) @ points
    level = torch.logsumexp(scores, -1).masked_fill(undefined, math.nan)
    return output.masked_fill(none[:, None], 0.0), level


def assert_same_kind(found, wanted):
    for found_one, wanted_one in zip(found, wanted, strict=True):
        found_one, wanted_one = found_one.double().flatten(), wanted_one.flatten()
        assert torch.equal(found_one.isnan(), wanted_one.isnan()), (found_one.tolist(), wanted_one.tolist())
        assert torch.equal(found_one.isinf(), wanted_one.isinf()), (found_one.tolist(), wanted_one.tolist())


OPTIONS = {
    "whole": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "sink": {"sink": 0.5},
    "log-weights": {"log_weight": True},
}


@pytest.mark.medium
@one_in(
    3,
    {
        "number, keys": [
            *((math.nan, keys) for keys in LENGTHS),
            (math.inf, 3),
            (math.inf, 16),
            (-math.inf, 7),
            (-math.inf, 33),
        ],
        "name": OPTIONS,
    },
)
def test_a_query(name, keys, number):
    """One entry of it, and all of it, beside finite ones: float32 here, every type below."""
    _compare(name, keys, number, torch.float32, where="query")


@pytest.mark.medium
@one_in(
    3,
    {
        "number": VALUES,
        "dtype": DTYPES,
        "where, keys": [("query", 3), ("key", 16), ("value", 17), ("keys", 3), ("keys", 17)],
    },
)
def test_every_type(where, keys, dtype, number):
    _compare("whole", keys, number, dtype, where)


def _compare(name, keys, number, dtype, where):
    queries = min(5, keys) if name == "window" else 5
    query, key, value = (draw(n, 3, seed=s).to(dtype) for s, n in enumerate((queries, keys, keys)))
    changed = {"query": query[queries // 2], "key": key[keys // 2], "value": value[keys // 2], "keys": key}[where]
    options = dict(OPTIONS[name])
    if "log_weight" in options:
        options["log_weight"] = draw(keys, seed=4)
    for part in (changed[..., :1], changed):
        part.fill_(number)
        wanted = by_definition(query, key, value, **options)
        if where == "value":
            wanted = wanted[0].where(wanted[0].isfinite(), math.nan), wanted[1]
        heads = [tensor[None, None] for tensor in (query, key, value)]
        grouped = [heads[0].expand(1, 2, -1, -1), *heads[1:]]
        for found in (ops.attention(*heads, **options), [r[:, 1] for r in ops.attention(*grouped, **options)]):
            output = found[0].where(found[0].isfinite(), math.nan) if where == "value" else found[0]
            assert_same_kind((output, found[1]), wanted)
        assert_same_kind([ops.log_partition(*heads[:2], **options)], wanted[1:])


@every_row("keys", LENGTHS)
@every_row("queries", [1, 3, 17])
@every_row("both", [True, False])
def test_gradients(both, queries, keys):
    """A query of NaN reaches its own gradient and that of every key; never is it 0."""
    query, key = (draw(1, 1, n, 3, seed=n, dtype=torch.float32) for n in (queries, keys))
    query[..., queries // 2, 0] = math.nan
    query.requires_grad_()
    key.requires_grad_()
    if both:
        total = sum(result.sum() for result in ops.attention(query, key, key))
    else:
        total = ops.log_partition(query, key).sum()
    of_query, of_key = torch.autograd.grad(total, (query, key))
    assert of_key.isnan().all() and of_query[..., queries // 2, :].isnan().all()
    assert of_query.isnan().any(-1).sum() == 1


@every_row("keys", [3, 20])
@every_row("options", [{}, {"softcap": 5.0}])
@every_row("learns", [True, False])
@every_row("weight", [lambda n: torch.full((n,), math.nan), lambda n: torch.tensor([math.nan] + [NO_KEY] * (n - 1))])
def test_a_log_weight_of_nan_is_no_hidden_key(weight, learns, options, keys):
    query, key = draw(1, 1, 4, 3, dtype=torch.float32), draw(1, 1, keys, 3, seed=1, dtype=torch.float32)
    weight = weight(keys).requires_grad_(learns)
    results = list(ops.attention(query, key, key, log_weight=weight, **options))
    if not learns:
        found = ops.attention_moments(query, key, key, log_weight=weight, backend="blocks", **options)
        results += [found.log_partition, found.entropy, found.output]
    for result in results:
        assert result.isnan().all()


def numbers_of(name, keys):
    """What each way into the kernel makes of a query of NaN beside a finite one, which must be NaN and finite."""
    query = torch.tensor([[math.nan, 0.0, 0.0], [1.0, 2.0, -1.0]])
    points = draw(keys, 3, dtype=torch.float32)
    atoms = Atoms.create(points)
    heads = query[None, None], points[None, None], points[None, None]
    if name == "atoms":
        return atoms.log_partition(query), atoms.mean(query)
    if name == "affine":
        image = affine(atoms, torch.eye(3), torch.ones(3))
        return image.log_partition(query), image.mean(query)
    if name == "power":
        sums = power(atoms, 2.0)
        return sums.log_partition(query), sums.mean(query)
    if name == "Hopfield.step":
        return (HopfieldEnergy.create(points).step(query),)
    if name == "sink with a value":
        return ops.attention(*heads, sink=0.0, sink_value=torch.zeros(3))
    if name == "merged parts":
        first, last = ([heads[0], *(part[:, :, half] for part in heads[1:])] for half in (slice(2), slice(2, None)))
        return Partial.of(ops.attention(*first)).merge(Partial.of(ops.attention(*last)))
    if name == "moments":
        return ops.attention_moments(*heads)[:7]
    return (ops.fisher_vp(*heads[:2], torch.ones_like(heads[0])),)


WAYS = [
    "atoms",
    "affine",
    "power",
    "Hopfield.step",
    "sink with a value",
    "merged parts",
    "moments",
    "fisher_vp",
]


@every_row("name", WAYS)
@every_row("keys", [3, 6, 20])
def test_every_way_in(keys, name):
    for result in numbers_of(name, keys):
        assert result is not None
        result = result.reshape(2, -1)
        assert result[0].isnan().all() and result[1].isfinite().all()


@every_row("keys", [3, 20])
def test_keys_on_disk(keys, tmp_path):
    points = draw(1, keys, 3, dtype=torch.float32)
    blocks = [AtomBlock(points[:, :2], None, None), AtomBlock(points[:, 2:], None, None)]
    store = AtomStore.write(tmp_path / str(keys), blocks)
    query = torch.tensor([[math.nan, 0.0, 0.0], [1.0, 2.0, -1.0]])[None, None].requires_grad_()
    level = streaming.log_partition(query, store)
    (gradient,) = torch.autograd.grad(level.sum(), query)
    for result in (level, gradient):
        assert result[0, 0, 0].isnan().all() and result[0, 0, 1].isfinite().all()


def test_overflow_is_no_missing_key():
    """Scores of −∞ from finite numbers: log Z is −∞, as of float64's scores in float32, and the gradient 0."""
    query, key = torch.full((1, 1, 2, 2), 1e30), torch.full((1, 1, 5, 2), -1e30)
    query[..., 1, :] = 1e-30
    query.requires_grad_()
    output, level = ops.attention(query, key, key.neg() * 1e-30)
    assert level[0, 0, 0] == -math.inf and not output[0, 0, 0].any()
    assert level[0, 0, 1].isfinite() and output[0, 0, 1].allclose(torch.ones(2))
    (gradient,) = torch.autograd.grad(level[0, 0, 1] + output.sum(), query)
    assert gradient.isfinite().all() and not gradient[0, 0, 0].any()


MASKED = {
    "causal": {"is_causal": True},
    "window": {"window": (7, 0)},
    "mask": {"log_weight": torch.ones(40, 40, dtype=torch.bool).tril()},
}


def moments_of(*tensors, backend, **options):
    if backend == "compiled" and not needs.compiler():
        pytest.skip("no compiler")
    with torch.no_grad():
        return ops.attention_moments(*tensors, backend=backend, **options)._asdict()


@pytest.mark.medium
@every_row("backend", ["blocks", "compiled"])
@every_row("mask", MASKED)
def test_a_hidden_score_of_any_size_is_hidden(mask, backend):
    """Products of 1e31 and more of the early queries with later keys, beside visible ones of about 1."""
    query, key, value = (draw(1, 2, 40, 1, seed=seed, dtype=torch.float32) for seed in range(3))
    query[:, :, :20] *= 1e15
    key[:, :, :20] *= 1e-15
    key[:, :, 20:] = 1e17 * key[:, :, 20:].abs()
    query.abs_()
    found = moments_of(query, key, value, backend=backend, **MASKED[mask])
    exact = moments_of(*(t.double() for t in (query, key, value)), backend="reference", **MASKED[mask])
    assert exact["max_score"][..., :20].abs().max() < 100 < 1e30 < (query[:, :, :20] * key.mT).amax()
    for name, numbers in found.items():
        torch.testing.assert_close(numbers[:, :, :20], exact[name][:, :, :20].to(numbers), rtol=1e-4, atol=1e-4)
    attended = ops.attention(query, key, value, backend="blocks", **MASKED[mask])
    torch.testing.assert_close(attended.output[:, :, :20], exact["output"][:, :, :20].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.medium
@every_row("backend", ["reference", "blocks", "compiled"])
@every_row("mask", {"no mask": {}} | MASKED)
def test_a_query_all_of_whose_scores_overflow_has_no_weights(mask, backend):
    """Beside keys that it does not see, whose scores would be large."""
    options = ({"no mask": {}} | MASKED)[mask]
    query, key = (draw(1, 2, 40, 2, seed=seed, dtype=torch.float32) for seed in range(2))
    query[:, :, 3] = torch.tensor([3e30, 0.0])
    key[:, :, : 40 if mask == "no mask" else 4, 0] = -3e30
    names = ["log_partition", "max_score", "entropy", "max_position", "max_weight"]
    found = moments_of(query, key, backend=backend, moments=names, **options)
    assert (found["log_partition"][:, :, 3] == -math.inf).all() and (found["max_score"][:, :, 3] == -math.inf).all()
    assert found["entropy"][:, :, 3].isnan().all() and (found["max_position"][:, :, 3] == -1).all()
    assert not (found["max_weight"][:, :, 3] > 0).any()
    output, level = ops.attention(query, key, key, backend="blocks", **options)
    assert (level[:, :, 3] == -math.inf).all() and not output[:, :, 3].any()
    change = ops.fisher_vp(query, key, torch.ones_like(query), backend="blocks", **options)
    assert not change[:, :, 3].isfinite().any()


@every_row("backend", ["blocks", "compiled"])
def test_scores_of_minus_1e30_and_less_count_as_overflow(backend):
    """Tiles hide with −1e30: a query none of whose visible scores is above that is as one whose scores are all −∞."""
    query, key = (draw(1, 2, 40, 2, seed=seed, dtype=torch.float32) for seed in range(2))
    query[:, :, 3] = torch.tensor([3e15, 0.0])
    key[..., 0] = -3e15
    assert (query[:, :, 3:4] @ key.mT).isfinite().all()
    found = moments_of(query, key, backend=backend, moments=["log_partition", "max_score", "entropy"])
    assert (found["log_partition"][:, :, 3] == -math.inf).all() and (found["max_score"][:, :, 3] == -math.inf).all()
    assert found["entropy"][:, :, 3].isnan().all()


@every_row("backend", ["blocks", "compiled"])
@every_row("keys, lost", [(40, 7), (9000, 5000)])
def test_keys_whose_scores_overflow_take_no_weight_from_others(keys, lost, backend):
    """Of one tile, and of several, the first of which has no score above −∞."""
    query, key = torch.tensor([[[[1e20]]]]), draw(1, 1, keys, 1, dtype=torch.float32) * 1e-20
    key[:, :, :lost] = -1e20
    found = moments_of(query, key, backend=backend, moments=["log_partition", "max_score", "entropy", "collision"])
    scores = (query.double() @ key.double().mT)[0, 0, 0, lost:]
    weights = torch.softmax(scores, 0)
    expected = {
        "log_partition": torch.logsumexp(scores, 0),
        "max_score": scores.max(),
        "entropy": torch.special.entr(weights).sum(),
        "collision": weights.square().sum(),
    }
    for name, number in expected.items():
        torch.testing.assert_close(found[name].squeeze(), number.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.medium
@one_in(3, {"backend": ["reference", "auto"], "keys": [3, 20], "number": VALUES, "hide": ["keys of a query", "window"]})
def test_a_query_that_sees_nothing_takes_no_part(hide, number, keys, backend):
    """Log Z −∞, output 0, and all other numbers, gradients too, as if it held zeros."""
    query, key, value = (draw(1, 1, n, 3, seed=n, dtype=torch.float32) for n in (keys + 4, keys, keys))
    if hide == "window":
        row, options = keys + 3, {"window": (1, 1)}
    else:
        row, keep = 1, torch.ones(keys + 4, keys, dtype=torch.bool)
        keep[row] = False
        options = {"log_weight": keep}
    results = []
    for content in (0.0, number):
        tensors = [query.clone(), key.clone(), value.clone()]
        tensors[0][..., row, :] = content
        tensors = [tensor.requires_grad_() for tensor in tensors]
        output, level = ops.attention(*tensors, backend=backend, **options)
        assert level[..., row] == -math.inf and not output[..., row, :].any()
        seen = level > -math.inf
        total = output.square().sum() + level[seen].sin().sum()
        results.append((output, level, *torch.autograd.grad(total, tensors)))
        found = ops.attention_moments(*(t.detach() for t in tensors), **options)
        results[-1] += (found.output, found.log_partition, found.entropy)
        results[-1] += (ops.fisher_vp(*(t.detach() for t in tensors[:2]), torch.ones_like(query), **options),)
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_log_partition_of_exactly_0_stays(monkeypatch):
    """What the kernel says where there is no key is right of finite scores, and costs no second computation."""
    query, key, value = torch.zeros(1, 1, 3, 2), draw(1, 1, 1, 2, dtype=torch.float32), torch.zeros(1, 1, 1, 2)
    monkeypatch.delattr(cpu_kernel, "by_reference")
    output, level = ops.attention(query, key, value)
    assert not output.any() and torch.equal(level, torch.zeros(1, 1, 3))
    keep = torch.tensor([[True], [False], [True]])
    assert ops.attention(query, key, value, log_weight=keep).log_partition.flatten().tolist() == [0.0, NO_KEY, 0.0]


@pytest.mark.slow
def test_compiled():
    query, key = draw(1, 2, 4, 3, dtype=torch.float32), draw(1, 1, 5, 3, seed=1, dtype=torch.float32)
    query[0, 0, 1] = math.nan
    query.requires_grad_()
    compiled = torch.compile(lambda q, k: tuple(ops.attention(q, k, k)), backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(query, key), ops.attention(query, key, key), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert found.isnan().any()
    (gradient,) = torch.autograd.grad(compiled(query, key)[1].sum(), query)
    assert gradient[0, 0, 1].isnan().all() and gradient.isnan().any(-1).sum() == 1


@pytest.mark.medium
@some_slow("dtype", [torch.float32, torch.bfloat16], 1)
def test_the_operator_of_compiled_code(dtype):
    query, key = draw(1, 2, 4, 3, dtype=dtype), draw(1, 1, 20, 3, seed=1, dtype=dtype)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for mask in (None, torch.zeros(1, 1, 1, 20)):
        torch.library.opcheck(cpu_kernel._forward_operator, (query, key, key, mask, 0.5, False), test_utils=tests)
