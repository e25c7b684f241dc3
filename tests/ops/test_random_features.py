"""Random features against their exact mean and variance, where draws can be trusted: ‖q + k‖ ≤ 1."""

import itertools
import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in

from massieu import ops
from massieu.ops.random_features import random_feature_log_partition

SIZE = 4


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def short(*shape, norm, seed=0):
    """Vectors of one norm."""
    return norm * torch.nn.functional.normalize(draw(*shape, seed=seed), dim=-1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def error_of(estimate):
    """The standard error of an estimate that was asked for it."""
    assert estimate.standard_error is not None
    return estimate.standard_error


def second_moment(q, keys, weights):
    """E Ẑ₁² term by term: Σ_ij w_i w_j exp(½‖2q + k_i + k_j‖² − ‖q‖² − ½(‖k_i‖² + ‖k_j‖²))."""
    total = 0.0
    for (k, w), (other, v) in itertools.product(zip(keys, weights, strict=True), repeat=2):
        exponent = (2 * q + k + other).square().sum() / 2 - q.square().sum() - (k.square() + other.square()).sum() / 2
        total += (w * v * exponent.exp()).item()
    return total


@one_in(2, {"scale": [None, 1.0, 0.3, -0.6], "weighted": [False, True]})
def test_the_standard_error_is_that_of_the_formula(scale, weighted):
    query, key = short(1, 4, 3, SIZE, norm=1.5, seed=1), short(1, 2, 6, SIZE, norm=2.0, seed=2)
    log_weight = draw(6, seed=3) if weighted else None
    found = random_feature_log_partition(
        query, key, generator=seeded(), features=50, scale=scale, log_weight=log_weight
    )
    beta = SIZE**-0.5 if scale is None else scale
    weights = torch.ones(6, dtype=torch.float64) if log_weight is None else log_weight.exp()
    for head, row in itertools.product(range(4), range(3)):
        q, k = query[0, head, row] * beta / abs(beta) ** 0.5, key[0, head // 2] * abs(beta) ** 0.5
        z = (weights * (k @ q).exp()).sum()
        variance = (second_moment(q, k, weights) - z**2) / 50
        assert error_of(found)[0, head, row].item() == pytest.approx((variance.sqrt() / z).item(), rel=1e-12)


def test_one_pair_has_the_known_variance():
    """e^{2q·k}(e^{‖q + k‖²} − 1), and 0 for k = −q, where every draw is exact."""
    query, key = short(1, 1, 1, SIZE, norm=0.5, seed=1), short(1, 1, 1, SIZE, norm=0.5, seed=2)
    found = random_feature_log_partition(query, key, generator=seeded(), features=1, scale=1.0)
    assert error_of(found).item() == pytest.approx(math.expm1((query + key).square().sum().item()) ** 0.5, rel=1e-12)
    exact = random_feature_log_partition(query, -query, generator=seeded(), features=3, scale=1.0)
    assert error_of(exact).item() < 1e-7
    torch.testing.assert_close(exact.log_partition, -query.square().sum(-1), atol=1e-14, rtol=1e-14)


def test_unbiased_with_that_variance():
    """Means and variances of 200,000 independent estimates, ‖q + k‖ ≤ 1, in standard errors by exact moments."""
    features, estimates = 2, 200_000
    query, key = short(1, 1, 1, SIZE, norm=0.4, seed=1), short(1, 1, 8, SIZE, norm=0.6, seed=2)
    generator = seeded(3)
    z = (key[0, 0] @ query[0, 0, 0]).exp().sum()
    known = error_of(random_feature_log_partition(query, key, generator=generator, features=features, scale=1.0))
    # Independent estimates: keys and query repeated would share their features, so many features are drawn at once.
    omega = torch.randn(estimates * features, SIZE, generator=generator, dtype=torch.float64)
    terms = torch.exp(omega @ query[0, 0, 0] - 0.08) * torch.exp(omega @ key[0, 0].T - 0.18).sum(-1)
    drawn = terms.view(estimates, features).mean(1) / z
    assert abs((drawn.mean() - 1) / (known.item() / estimates**0.5)) < 5
    spread = (drawn - 1).square()
    assert abs((spread.mean() - known.item() ** 2) / (spread.std() / estimates**0.5)) < 5


def test_the_estimate_is_the_formula_of_its_draws():
    query, key, log_weight = draw(2, 4, 3, SIZE, seed=1), draw(2, 2, 7, SIZE, seed=2), draw(2, 2, 1, 1, 7, seed=3)
    five = query.unflatten(1, (2, 2))
    found = random_feature_log_partition(
        five, key, generator=seeded(4), features=9, scale=0.5, log_weight=log_weight, standard_error=False
    )
    omega = torch.randn(9, SIZE, generator=seeded(4), dtype=torch.float64)

    def phi(x):
        x = x * 0.5**0.5
        return torch.exp(x @ omega.T - x.square().sum(-1, keepdim=True) / 2)

    sums = (log_weight[:, :, 0, 0, :, None].exp() * phi(key)).sum(2)
    z = torch.einsum("bhglm,bhm->bhgl", phi(five), sums) / 9
    torch.testing.assert_close(found.log_partition, z.log(), atol=1e-13, rtol=1e-13)
    assert found.standard_error is None


def test_log_z_is_biased_down_by_half_the_variance():
    """The mean of log Ẑ over 50,000 draws of 4 features: log Z − ½·(standard error)², to third order."""
    query, key = short(1, 1, 1, SIZE, norm=0.4, seed=1), short(1, 1, 8, SIZE, norm=0.6, seed=2)
    exact = ops.log_partition(query, key, scale=1.0).item()
    generator, count = seeded(5), 50_000
    omega = torch.randn(count, 4, SIZE, generator=generator, dtype=torch.float64)
    terms = torch.exp(omega @ query[0, 0, 0] - 0.08) * torch.exp(omega @ key[0, 0].T - 0.18).sum(-1)
    drawn = terms.mean(1).log() - exact
    error = error_of(random_feature_log_partition(query, key, generator=generator, features=4, scale=1.0)).item()
    assert drawn.mean() + 5 * drawn.std() / count**0.5 < 0
    assert abs(drawn.mean() + error**2 / 2) < 5 * drawn.std() / count**0.5 + error**3


def test_heavy_tails_are_told_by_the_formula_and_missed_by_the_draws():
    """Trap 32: at ‖q + k‖ = 6 two thousand draws see a tiny part of the variance, so an empirical error is no error."""
    query = short(1, 1, 1, SIZE, norm=3.0, seed=1)
    found = random_feature_log_partition(query, query.clone(), generator=seeded(), features=2000, scale=1.0)
    assert error_of(found).item() == pytest.approx((math.expm1(36) / 2000) ** 0.5, rel=1e-9)
    omega = torch.randn(2000, SIZE, generator=seeded(1), dtype=torch.float64)
    drawn = torch.exp(2 * (omega @ query[0, 0, 0]) - 9 - 9)  # in units of Z
    assert drawn.std() < 0.01 * math.expm1(36) ** 0.5


def test_extremes_are_defined():
    query, key = short(1, 1, 2, SIZE, norm=100.0, seed=1), short(1, 1, 3, SIZE, norm=100.0, seed=2)
    found = random_feature_log_partition(query.float(), key.float(), generator=seeded(), features=8, scale=1.0)
    assert found.log_partition.isfinite().all()
    assert not error_of(found).isnan().any() and (error_of(found) > 1e30).all()
    hidden = torch.zeros(3, dtype=torch.bool)
    nothing = random_feature_log_partition(query, key, generator=seeded(), log_weight=hidden)
    assert (nothing.log_partition == -math.inf).all() and (nothing.standard_error == 0).all()
    empty = random_feature_log_partition(query, key[:, :, :0], generator=seeded())
    assert (empty.log_partition == -math.inf).all() and (empty.standard_error == 0).all()
    half = random_feature_log_partition(query.half(), key.half(), generator=seeded(), scale=1e-4)
    assert half.log_partition.dtype == error_of(half).dtype == torch.float32


@pytest.mark.medium
def test_the_gradient_is_the_second_estimator():
    """∇ log Ẑ = Σ r_ω ω − q, and all derivatives by differences."""
    query, key = draw(1, 1, 2, SIZE, seed=1).requires_grad_(), draw(1, 1, 5, SIZE, seed=2).requires_grad_()
    weight = draw(5, seed=3).requires_grad_()

    def call(query, key, weight):
        return random_feature_log_partition(
            query, key, generator=seeded(6), features=7, scale=1.0, log_weight=weight, standard_error=False
        ).log_partition

    (slope,) = torch.autograd.grad(call(query, key, weight).sum(), query)
    omega = torch.randn(7, SIZE, generator=seeded(6), dtype=torch.float64)
    with torch.no_grad():
        level = (
            omega @ query[0, 0].T
            + ((omega @ key[0, 0].T) + weight - key[0, 0].square().sum(-1) / 2).logsumexp(-1)[:, None]
        )
        expected = level.softmax(0).T @ omega - query[0, 0]
    torch.testing.assert_close(slope[0, 0], expected, atol=1e-12, rtol=1e-12)
    check_derivatives(call, (query, key, weight))


def test_blocks_of_the_variance(monkeypatch):
    query, key = draw(1, 2, 9, SIZE, seed=1), draw(1, 2, 11, SIZE, seed=2)
    whole = random_feature_log_partition(query, key, generator=seeded()).standard_error
    monkeypatch.setattr("massieu.ops.random_features.BLOCK_NUMBERS", 33)
    torch.testing.assert_close(random_feature_log_partition(query, key, generator=seeded()).standard_error, whole)


def estimate(query, key, seed=7, **options):
    return random_feature_log_partition(query, key, generator=seeded(seed), features=9, scale=1.0, **options)


def test_vmap_with_draws_in_common():
    """randomness="same": each item as it would be alone, its gradient and standard error too."""
    query, key = draw(3, 1, 2, 4, SIZE, seed=1), draw(1, 2, 5, SIZE, seed=2)
    found = torch.func.vmap(lambda q: tuple(estimate(q, key)), randomness="same")(query)
    slope = torch.func.vmap(
        torch.func.grad(lambda q: estimate(q, key, standard_error=False).log_partition.sum()), randomness="same"
    )(query)
    for item in range(3):
        one = query[item].clone().requires_grad_()
        alone = estimate(one, key)
        for part, wanted in zip(found, alone, strict=True):
            assert part is not None
            torch.testing.assert_close(part[item], wanted, atol=1e-12, rtol=1e-12)
        (wanted,) = torch.autograd.grad(alone.log_partition.sum(), one)
        torch.testing.assert_close(slope[item], wanted, atol=1e-12, rtol=1e-12)


def test_vmap_with_draws_of_each_item_s_own():
    """randomness="different": 20,000 independent estimates of one Z, in standard errors of the formula."""
    query, key = short(1, 1, 1, SIZE, norm=0.4, seed=1), short(1, 1, 8, SIZE, norm=0.6, seed=2)
    many = query.expand(20_000, *query.shape)
    call = lambda q: estimate(q, key, standard_error=False).log_partition  # noqa: E731
    drawn = torch.func.vmap(call, randomness="different")(many).flatten().exp()
    assert len(drawn.unique()) > 19_000
    exact, error = ops.log_partition(query, key, scale=1.0).exp().item(), error_of(estimate(query, key)).item()
    assert abs(drawn.mean().item() / exact - 1) < 5 * error / 20_000**0.5
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(many[:2])


@pytest.mark.slow
def test_compiled_around_it():
    torch._dynamo.reset()
    query, key = draw(1, 2, 4, SIZE, seed=1), draw(1, 2, 5, SIZE, seed=2)
    generator = seeded()

    def step(query):
        return 2 * random_feature_log_partition(2 * query, key, generator=generator).log_partition + 1

    found = torch.compile(step, backend="aot_eager")(query)
    generator.manual_seed(0)
    torch.testing.assert_close(found, step(query), atol=1e-12, rtol=1e-12)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="random_feature_log_partition cannot be compiled"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(query)


def test_autocast_changes_nothing():
    query, key = draw(1, 2, 4, SIZE, seed=1).float().requires_grad_(), draw(1, 2, 5, SIZE, seed=2).float()
    wanted = estimate(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        found = estimate(query, key)
    assert torch.equal(found.log_partition, wanted.log_partition)
    assert torch.equal(found.standard_error, wanted.standard_error)
    slopes = (torch.autograd.grad(result.log_partition.sum(), query)[0] for result in (found, wanted))
    torch.testing.assert_close(*slopes)


GOOD = {"query": draw(1, 2, 3, SIZE), "key": draw(1, 2, 5, SIZE), "generator": seeded()}
BAD = {
    "generator": ({"generator": 0}, TypeError, "generator must be a torch.Generator, got 0"),
    "features": ({"features": 0}, ValueError, "features must be a whole number, at least 1, got 0"),
    "half a feature": ({"features": 1.5}, TypeError, "features must be a whole number, got 1.5"),
    "scale": ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a number or None, got a tensor"),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
    "weights of queries": ({"log_weight": draw(3, 5)}, ValueError, r"one a key for all queries.*got \(1, 3\)"),
    "weights of query heads": (
        {"query": draw(1, 4, 3, SIZE), "log_weight": draw(1, 4, 1, 5)},
        ValueError,
        r"one a key for all queries.*got \(2, 1\)",
    ),
    "shapes": ({"key": draw(1, 2, 5, 3)}, ValueError, "one head size, got 4"),
}


@every_row(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_calls(change, error, message):
    with pytest.raises(error, match=message):
        random_feature_log_partition(**(GOOD | change))
