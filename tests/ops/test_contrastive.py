"""InfoNCE against explicit softmax formulas over the matrix of scores, written out here."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, some_slow

from massieu.ops import Documents, contrastive, reference, score_tiles
from massieu.ops.contrastive import FalseNegatives, info_nce


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that divide no shape of these tests."""
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 12)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 4)


def tensors(pairs=5, size=4, extra=3, dtype=torch.float64, seed=0, spread=1.0):
    """Queries, keys, negatives and a temperature."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        torch.randn(n, size, generator=generator, dtype=torch.float64).mul_(spread).to(dtype)
        for n in (pairs, pairs, extra)
    ]
    return [tensor.requires_grad_() for tensor in (*found, torch.tensor(0.7, dtype=dtype))]


def matrix_loss(query, key, negatives=None, temperature=1.0, log_weight=None, positive=None, symmetric=False):
    """A(q) − q·k₊, and log Z, from all scores at once."""
    keys = key if negatives is None else torch.cat([key, negatives])
    scores = query @ keys.mT / temperature
    if log_weight is None:
        log_weight = scores.new_zeros(scores.shape[1])
    if log_weight.dtype == torch.bool:
        log_weight = scores.new_zeros(log_weight.shape).masked_fill(~log_weight, -math.inf)
    positive = torch.arange(len(query)) if positive is None else positive
    own = scores.gather(1, positive.unsqueeze(1)).squeeze(1)
    level = torch.logsumexp(scores + log_weight, 1)
    loss = (level - own).mean()
    if not symmetric:
        return loss, level
    if log_weight.ndim == 2:
        scores = scores + log_weight
    other = torch.logsumexp(scores[:, : len(query)], 0)
    return (loss + (other - own).mean()) / 2, torch.stack([level, other])


def several_positives(query, key, positive, temperature, log_weight=None, negatives=None):
    """Mean over queries with a positive of log Z − the mean score of the positives (Khosla et al. 2020, eq. 2)."""
    keys = key if negatives is None else torch.cat([key, negatives])
    scores = query @ keys.mT / temperature
    logits = scores if log_weight is None else scores.masked_fill(~log_weight, -math.inf)
    means = [row[: len(key)][mask].mean() for row, mask in zip(scores, positive, strict=True) if mask.any()]
    level = torch.logsumexp(logits, 1)
    return torch.stack([a - b for a, b in zip(level[positive.any(1)], means, strict=True)]).mean(), level


MASKS = {
    "labels": lambda: torch.tensor([0, 1, 0, 1, 2])[:, None] == torch.tensor([0, 1, 0, 1, 2]),
    "one each": lambda: torch.eye(5, dtype=torch.bool),
    "some have none": lambda: torch.tensor([[1, 1, 0, 0, 1], *4 * [[0, 0, 0, 0, 0]]]).bool(),
}


@pytest.mark.parametrize("weight", ["none", "not itself", "equal ids"])
@pytest.mark.parametrize("negatives", [False, True], ids=["", "negatives"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_positives(name, negatives, weight, small_tiles, monkeypatch):
    monkeypatch.setattr(contrastive, "POSITIVE_PAIRS", 12)  # blocks of two rows
    query, key, extra, temperature = tensors()
    positive = MASKS[name]()
    if weight != "none" and name != "one each":
        positive = positive & ~torch.eye(5, dtype=torch.bool)
    more = extra if negatives else None
    count = 8 if negatives else 5
    seen = given = None
    if weight == "not itself":
        seen = given = ~torch.eye(5, count, dtype=torch.bool)
    if weight == "equal ids":
        ids = torch.arange(count) % 4
        given = FalseNegatives(ids[:5], ids)
        seen = (ids[:5, None] != ids) | torch.nn.functional.pad(positive, (0, count - 5))
    ours = info_nce(
        query,
        key,
        positive=positive,
        negatives=more,
        log_weight=given,
        temperature=temperature,
        return_log_partition=True,
    )
    theirs = several_positives(query, key, positive, temperature, seen, more)
    assert_equal(ours, theirs, [query, key, temperature, *([extra] if negatives else [])])


def test_a_symmetric_mask():
    query, _, _, temperature = tensors()
    key = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    positive = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    ours = info_nce(query, key, positive=positive, temperature=temperature, symmetric=True)
    both = (
        several_positives(query, key, positive, temperature)[0],
        several_positives(key, query, positive.mT, temperature)[0],
    )
    assert_equal((ours, ours), (sum(both) / 2, sum(both) / 2), [query, key, temperature])


def test_a_mask_of_one_positive_each_is_the_number_of_it():
    query, key, _, _ = tensors()
    number = torch.tensor([3, 1, 1, 0, 4])
    by_mask = info_nce(query, key, positive=F.one_hot(number, 5).bool(), temperature=0.3)
    assert torch.allclose(by_mask, info_nce(query, key, positive=number, temperature=0.3), atol=1e-12)


@every_row("weight", ["keys", "pairs", "float pairs"])
@every_row("returned", [False, True])
def test_nan_that_a_mask_does_not_count_has_no_gradient(weight: str, returned: bool):
    """A query without a positive and a key that is hidden from all hold NaN: loss and gradients are those without them."""
    query, key, _, temperature = tensors()
    positive = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], *3 * [[0, 1, 0, 1, 0]]]).bool()
    seen = torch.tensor([1, 1, 1, 1, 0]).bool()
    given = {
        "keys": seen,
        "pairs": seen.expand(5, 5),
        "float pairs": torch.where(seen, 0.0, -math.inf).double().expand(5, 5),
    }
    rows = torch.tensor([0, 2, 3, 4])
    wanted = several_positives(query[rows], key[:4], positive[rows, :4], temperature)[0]
    gradients = torch.autograd.grad(wanted, [query, key])
    q = query.detach().index_fill(0, torch.tensor([1]), math.nan).requires_grad_()
    k = key.detach().index_fill(0, torch.tensor([4]), math.nan).requires_grad_()
    result = info_nce(
        q, k, positive=positive, log_weight=given[weight], temperature=temperature, return_log_partition=returned
    )
    loss = result.loss if returned else result
    assert torch.allclose(loss, wanted, rtol=1e-12)
    for found, expected in zip(torch.autograd.grad(loss, [q, k]), gradients, strict=True):
        assert torch.allclose(found, expected, atol=1e-12)
    if returned:
        assert result.log_partition.isnan().tolist() == [False, True, False, False, False]


def test_nan_that_counts_stays_nan():
    query, key, _, _ = tensors()
    positive = torch.eye(5, dtype=torch.bool)
    broken = query.detach().index_fill(0, torch.tensor([1]), math.nan)
    assert info_nce(broken, key, positive=positive, temperature=1.0).isnan()
    positive[1] = False
    # A column of the keys' own loss.
    assert info_nce(broken, key, positive=positive, temperature=1.0, symmetric=True).isnan()


def test_second_derivatives_of_a_mask():
    query, key, _, temperature = tensors(3, 2)
    positive = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]).bool()
    check_derivatives(lambda q, k, t: info_nce(q, k, positive=positive, temperature=t), (query, key, temperature))


def test_nt_xent_is_as_published():
    """Chen et al. 2020, eq. 1: the mean over all views of −log of the other view's weight among all views but itself."""
    generator = torch.Generator().manual_seed(0)
    z = F.normalize(torch.randn(8, 5, dtype=torch.float64, generator=generator), dim=-1)
    number = torch.arange(8)
    found = info_nce(z, z, positive=number.roll(4), log_weight=FalseNegatives(number), temperature=0.5)
    terms = []
    for i in range(8):
        weights = [math.exp(float(z[i] @ z[j]) / 0.5) for j in range(8)]
        terms.append(-math.log(weights[(i + 4) % 8] / (sum(weights) - weights[i])))
    assert float(found) == pytest.approx(sum(terms) / 8, abs=1e-12)


def test_masks_that_do_not_fit():
    query, key, _, _ = tensors()
    with pytest.raises(ValueError, match=r"positive must have shape \(5, 5\), got"):
        info_nce(query, key, positive=torch.ones(5, dtype=torch.bool), temperature=1.0)
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="does not go with documents"):
        info_nce(query, key, positive=mask, temperature=1.0, documents=Documents.of_lengths([2, 3]))
    assert info_nce(query, key, positive=torch.zeros(5, 5, dtype=torch.bool), temperature=1.0).isnan()


def assert_equal(ours, theirs, arguments, atol=1e-12):
    """Values and gradients of two pairs (loss, log Z)."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, atol=atol, equal_nan=True)
    found, wanted = (
        torch.autograd.grad(loss + level.sin().sum(), arguments, retain_graph=True) for loss, level in (ours, theirs)
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=atol, equal_nan=True)


@pytest.mark.medium
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from(["none", "keys", "mask of keys", "pairs", "mask of pairs", "ids"]),
    st.sampled_from([1e-3, 1.0, 30.0]),
    st.sampled_from([(12, 4), (1, 1), (5, 100), (1 << 20, 2048)]),
    st.integers(0, 9),
)
def test_equals_the_score_matrix(pairs, size, extra, symmetric, weights, spread, tile, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_tiles, "TILE_PAIRS", tile[0])
        patch.setattr(score_tiles, "TILE_ROWS", tile[1])
        arguments = tensors(pairs, size, extra, seed=seed, spread=spread)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, (pairs + extra,), generator=generator)
        weight = torch.randn(pairs, pairs + extra, generator=generator, dtype=torch.float64)
        keep = (weight > 0) | torch.eye(pairs, pairs + extra, dtype=torch.bool)
        different = (ids[:pairs, None] != ids) | torch.eye(pairs, pairs + extra, dtype=torch.bool)
        given_weight, matrix_weight = {
            "none": (None, None),
            "keys": (weight[0], weight[0]),
            "mask of keys": (keep[0], keep[0]),
            "pairs": (weight.where(keep, -math.inf),) * 2,
            "mask of pairs": (keep, keep),
            "ids": (FalseNegatives(ids[:pairs], ids), different),
        }[weights]
        query, key, negatives, temperature = arguments
        ours = info_nce(
            query,
            key,
            negatives=negatives,
            log_weight=given_weight,
            temperature=temperature,
            symmetric=symmetric,
            return_log_partition=True,
        )
        theirs = matrix_loss(query, key, negatives, temperature, matrix_weight, symmetric=symmetric)
        assert_equal(ours, theirs, arguments, atol=1e-12 * max(1.0, spread) ** 4)


@pytest.mark.usefixtures("small_tiles")
def test_positives_by_index():
    query, key, _, temperature = tensors()
    query = query.detach()[[0, 1, 2, 3, 4, 0, 0]].requires_grad_()
    positive = torch.tensor([4, 3, 2, 1, 0, 0, 0], dtype=torch.int32)
    ours = info_nce(query, key, positive=positive, temperature=temperature, return_log_partition=True)
    theirs = matrix_loss(query, key, temperature=temperature, positive=positive.long())
    assert_equal(ours, theirs, (query, key, temperature))


@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_log_weights_have_gradients(per_pair, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 12)
    query, key, negatives, temperature = tensors()
    weight = torch.randn(*([5, 8] if per_pair else [8]), dtype=torch.float64, requires_grad=True)
    options = {"temperature": temperature, "symmetric": True}
    ours = info_nce(query, key, negatives=negatives, log_weight=weight, return_log_partition=True, **options)
    theirs = matrix_loss(query, key, negatives, log_weight=weight, **options)
    assert_equal(ours, theirs, (query, key, negatives, temperature, weight))


WEIGHTS = {
    "none": None,
    "keys": torch.linspace(-1, 1, 8, dtype=torch.float64),
    "pairs": torch.linspace(-1, 1, 40, dtype=torch.float64)
    .view(5, 8)
    .masked_fill(torch.eye(5, 8).flip(1) > 0, -math.inf),
    "ids": FalseNegatives(torch.tensor([0, 1, 0, 2, 1]), torch.tensor([0, 1, 0, 2, 1, 0, 5, 2])),
}


@pytest.mark.medium
@some_slow("weights", WEIGHTS, 2)
@pytest.mark.usefixtures("small_tiles")
def test_derivatives_of_every_kind(weights):
    def function(query, key, negatives, temperature):
        options = {"log_weight": WEIGHTS[weights], "temperature": temperature, "return_log_partition": True}
        return tuple(info_nce(query, key, negatives=negatives, symmetric=weights != "keys", **options))

    arguments = tensors()
    check_derivatives(function, arguments, forward=True)


def test_fenchel_young():
    """ℓ = A(q) − q·k₊: gradient mean − positive, Hessian the covariance; 0 only in the limit (S23)."""
    query, key = (tensor.detach() for tensor in tensors()[:2])
    one = query[:1]

    def loss(q):
        return info_nce(q, key, positive=torch.tensor([2]), temperature=1.0)

    p = torch.softmax(one[0] @ key.mT, -1)
    mean = p @ key
    assert torch.allclose(torch.func.grad(loss)(one)[0], mean - key[2])
    centred = key - mean
    assert torch.allclose(torch.func.hessian(loss)(one)[0, :, 0], (p.unsqueeze(1) * centred).mT @ centred)
    assert torch.allclose(loss(one), -p[2].log())
    # A(q) + A*(k₊) − q·k₊ is the Kullback–Leibler divergence from the softmax to the vertex, where A* = 0.
    vertex = F.one_hot(torch.tensor(2), 5).double()
    assert torch.allclose(loss(one), F.kl_div(p.log(), vertex, reduction="sum"))
    assert loss(one) > 0


@given(st.integers(1, 9), st.integers(0, 5), st.booleans(), st.sampled_from([1e-4, 1.0, 100.0]), st.integers(0, 99))
def test_without_weights_never_below_zero(pairs, extra, symmetric, spread, seed):
    query, key, negatives, _ = tensors(pairs, 3, extra, dtype=torch.float32, seed=seed, spread=spread)
    assert info_nce(query, key, negatives=negatives, temperature=0.1, symmetric=symmetric) >= 0


def test_all_negatives_masked_leaves_no_loss_and_no_gradient():
    assert info_nce(*(tensor[:1] for tensor in tensors()[:2]), temperature=0.1, symmetric=True) == 0
    query, key, negatives, temperature = tensors()
    same = FalseNegatives(torch.zeros(5, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    for log_weight in (same, torch.eye(5, 8, dtype=torch.bool), torch.eye(5, 8, dtype=torch.float64).log()):
        for symmetric in (False, True):
            loss = info_nce(
                query, key, negatives=negatives, log_weight=log_weight, temperature=temperature, symmetric=symmetric
            )
            assert loss == 0
            gradients = torch.autograd.grad(loss, (query, key, negatives, temperature))
            assert all((gradient.abs() < 1e-15).all() for gradient in gradients)


def test_a_query_that_sees_no_key_has_no_loss():
    query, key, _, temperature = tensors()
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[1] = False
    loss, level = info_nce(query, key, log_weight=keep, temperature=temperature, return_log_partition=True)
    rest = [0, 2, 3, 4]
    wanted = matrix_loss(query[rest], key, temperature=temperature, positive=torch.tensor(rest))[0] * 4 / 5
    assert torch.allclose(loss, wanted)
    assert level[1] == -math.inf
    gradients = torch.autograd.grad(loss, (query, key, temperature), create_graph=True)
    wanted_gradients = torch.autograd.grad(wanted, (query, key, temperature))
    for one, other in zip(gradients, wanted_gradients, strict=True):
        assert torch.allclose(one, other)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (query, key))
    assert all(gradient.isfinite().all() for gradient in second)
    nothing = info_nce(query, key, log_weight=torch.zeros(5, dtype=torch.bool), temperature=temperature)
    assert nothing == 0 and (torch.autograd.grad(nothing, query)[0] == 0).all()


def test_a_masked_positive_still_attracts():
    """Left out of A alone: the decoupled contrastive loss, which may be negative."""
    query, key = (tensor.detach() for tensor in tensors()[:2])
    keep = ~torch.eye(5, dtype=torch.bool)
    scores = query @ key.mT / 0.1
    wanted = (torch.logsumexp(scores.masked_fill(~keep, -math.inf), 1) - scores.diagonal()).mean()
    assert torch.allclose(info_nce(query, key, log_weight=keep, temperature=0.1), wanted)


def test_no_query_is_nan():
    query, key, _, temperature = tensors()
    loss, level = info_nce(query[:0], key[:0], temperature=temperature, return_log_partition=True)
    assert loss.isnan() and level.shape == (0,)
    loss, level = info_nce(query[:0], key[:0], temperature=1.0, symmetric=True, return_log_partition=True)
    assert loss.isnan() and level.shape == (2, 0)


@every_row("temperature", [1e-8, 1e8, 1, 0.5, torch.tensor([0.5]), torch.nn.Parameter(torch.tensor(0.5))])
def test_any_temperature(temperature):
    query, key, _, _ = tensors(dtype=torch.float32)
    loss = info_nce(query, key, temperature=temperature)
    number = float(torch.as_tensor(temperature).detach())
    wanted = matrix_loss(query.double(), key.double(), temperature=number)[0]
    assert torch.allclose(loss.double(), wanted, rtol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (query, key)))


@pytest.mark.usefixtures("small_tiles")
@every_row(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 7e-4)])
def test_precision(dtype, bound):
    """Results are float32; the gradients of half-precision inputs are rounded once."""
    query, key, negatives, _ = tensors(40, 16, 9, dtype=dtype)
    options = {"temperature": 0.5, "symmetric": True}
    loss, level = info_nce(query, key, negatives=negatives, return_log_partition=True, **options)
    assert loss.dtype == level.dtype == torch.float32
    double = [tensor.detach().double().requires_grad_() for tensor in (query, key, negatives)]
    wanted, levels = matrix_loss(*double, **options)
    assert torch.allclose(loss.double(), wanted, rtol=1e-6) and torch.allclose(level.double(), levels, rtol=1e-6)
    found = torch.autograd.grad(loss, (query, key, negatives))
    for one, other in zip(found, torch.autograd.grad(wanted, double), strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, rtol=bound, atol=bound * float(other.abs().max()))


@pytest.mark.usefixtures("small_tiles")
def test_strides_do_not_matter():
    query, key, _, _ = tensors(6, 4)
    views = query.mT.contiguous().mT, torch.stack([key, key], 2)[:, :, 0]
    ours = info_nce(*views, temperature=0.5, symmetric=True, return_log_partition=True)
    assert_equal(ours, matrix_loss(query, key, temperature=0.5, symmetric=True), (query, key))
    one = query[:1].expand(6, 4)
    assert_equal(
        info_nce(one, key, temperature=0.5, return_log_partition=True),
        matrix_loss(one, key, temperature=0.5),
        (query, key),
    )


@pytest.mark.usefixtures("small_tiles")
def test_vmap_over_groups():
    """Pairs within each of three groups; ids of their own in each."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator)
    ids = torch.randint(3, (3, 5), generator=generator)

    def loss(q, k, i):
        return info_nce(q, k, log_weight=FalseNegatives(i), temperature=0.5, symmetric=True)

    losses = torch.func.vmap(loss)(query, key, ids)
    gradients = torch.func.vmap(torch.func.grad(loss))(query, key, ids)
    for group in range(3):
        keep = (ids[group, :, None] != ids[group]) | torch.eye(5, dtype=torch.bool)
        one = query[group].clone().requires_grad_()
        wanted = matrix_loss(one, key[group], temperature=0.5, log_weight=keep, symmetric=True)[0]
        assert torch.allclose(losses[group], wanted)
        assert torch.allclose(gradients[group], torch.autograd.grad(wanted, one)[0])


@pytest.mark.slow
def test_compiled_training_step():
    torch._dynamo.reset()
    arguments = tensors()
    ids = torch.arange(5) % 3

    def function(query, key, negatives, temperature):
        same = FalseNegatives(ids, torch.cat([ids, ids[:3]]))
        options = {"log_weight": same, "symmetric": True, "return_log_partition": True}
        return tuple(info_nce(query, key, negatives=negatives, temperature=temperature, **options))

    assert_equal(
        torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments), function(*arguments), arguments
    )


@pytest.mark.slow
def test_compiling_a_transform_keeps_the_gradient():
    torch._dynamo.reset()
    query, key = (tensor.detach() for tensor in tensors()[:2])
    gradient = torch.func.grad(lambda q: info_nce(q, key, temperature=0.5))
    wanted = (torch.softmax(query @ key.mT / 0.5, -1) @ key - key) / 0.5 / 5
    assert torch.allclose(torch.compile(gradient, backend="aot_eager", fullgraph=True)(query), wanted)


def test_third_derivative_in_forward_mode():
    query, key = (tensor.detach() for tensor in tensors(1, extra=0)[:2])
    keys = torch.cat([key, 2 * key.flip(1), -key])

    def along(function):
        return lambda t: torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]

    def loss(t):
        return info_nce(query + t * key, keys, positive=torch.tensor([0]), temperature=1.0)

    p, slope = torch.softmax(query[0] @ keys.mT, -1), keys @ key[0]
    found = along(along(along(loss)))(query.new_zeros(()))
    assert torch.allclose(found, (p * (slope - p @ slope) ** 3).sum())


def test_nothing_of_queries_times_keys_is_kept():
    query, key, _, temperature = tensors(300, 2)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        same = FalseNegatives(torch.arange(300) % 7)
        loss = info_nce(query, key, log_weight=same, temperature=temperature, symmetric=True)
        torch.autograd.grad(loss, (query, key, temperature), create_graph=True)
    assert 600 <= max(sizes) < 1000
