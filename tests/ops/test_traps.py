"""Traps of the theory, each with its number in the test's name; trap 15 is bug 8 of the peers too."""

import math

import pytest
import torch
from tests.support.ops.explicit import draw, finite
from tests.support.rows import every_row
from torch.func import grad

from massieu import ops
from massieu.ops import AtomBlock, AtomStore, Partial, streaming

BACKENDS = ["reference", "fused"]
close = torch.testing.assert_close


@every_row("beta", [0.25, 1.0, 3.0])
@every_row("backend", BACKENDS)
def test_trap_5_the_energy_carries_the_inverse_of_beta(beta, backend):
    """−∇ of −β⁻¹ log Z is attention; without β⁻¹ it is β times that."""
    query, key = draw(2, 2, 3, 4), draw(2, 2, 6, 4, seed=1)
    scores = torch.einsum("bhld,bhnd->bhln", query, key)
    mean = torch.softmax(beta * scores, -1) @ key
    found = grad(lambda q: (ops.log_partition(q, key, scale=beta, backend=backend) / beta).sum())(query)
    close(found, mean, rtol=0, atol=1e-12)
    close(ops.attention(query, key, key, scale=beta, backend=backend).output, found, rtol=0, atol=1e-12)
    raw = grad(lambda q: ops.log_partition(q, key, scale=beta, backend=backend).sum())(query)
    close(raw, beta * mean, rtol=0, atol=1e-12)
    # d/dβ of log Z is the mean score, so that β⁻¹ log Z falls with β by the entropy over β².
    inverse = torch.tensor(beta, dtype=torch.float64)
    slope = grad(lambda b: (ops.log_partition(query, key, scale=b, backend=backend) / b).sum())(inverse)
    entropy = torch.special.entr(torch.softmax(beta * scores, -1)).sum()
    close(slope, -entropy / beta**2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_14_a_query_bias_is_a_weight_of_the_keys_and_a_key_bias_moves_log_z_alone(backend):
    query, key, value = draw(2, 4, 3, 5), draw(2, 2, 7, 5, seed=1), draw(2, 2, 7, 2, seed=2)
    bias, scale = draw(4, 1, 5, seed=3), 0.6
    weight = scale * torch.einsum("hod,bhnd->bhon", bias, key.repeat_interleave(2, 1))
    found = ops.attention(query + bias, key, value, scale=scale, backend=backend)
    wanted = ops.attention(query, key, value, scale=scale, log_weight=weight, backend=backend)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, rtol=0, atol=1e-12)

    shift = draw(2, 1, 5, seed=4)
    moved = ops.attention(query, key + shift, value, scale=scale, backend=backend)
    still = ops.attention(query, key, value, scale=scale, backend=backend)
    gain = scale * (query * shift.repeat_interleave(2, 0)).sum(-1)
    close(moved.output, still.output, rtol=0, atol=1e-12)
    close(moved.log_partition, still.log_partition + gain, rtol=0, atol=1e-12)
    assert float(gain.abs().min()) > 1e-3


def test_trap_14_what_a_key_bias_does_not_change():
    """S25: entropy, centred moments, covariances, and log Z − log n − the mean score, which is a divergence."""
    query, key = draw(1, 2, 3, 5), draw(1, 2, 7, 5, seed=1)
    shifted, vector = key + draw(2, 1, 5, seed=4), draw(1, 2, 3, 5, seed=5)
    moved, still = ops.attention_moments(query, shifted), ops.attention_moments(query, key)
    for name in ("entropy", "score_variance", "max_weight", "collision", "prior_score_variance"):
        close(getattr(moved, name), getattr(still, name), rtol=0, atol=1e-12)
    selective = [m.log_partition - m.prior_log_partition - m.prior_mean_score for m in (moved, still)]
    close(*selective, rtol=0, atol=1e-12)
    assert float(selective[0].min()) >= 0
    close(ops.fisher_vp(query, shifted, vector), ops.fisher_vp(query, key, vector), rtol=0, atol=1e-12)


# --- trap 15, bug 8: nothing is visible ------------------------------------------------------------------------------


def nothing_visible():
    """Each function where every key is hidden, of leaves; results there, −inf or 0."""
    query, key, value = draw(1, 2, 3, 4), draw(1, 2, 5, 4, seed=1), draw(1, 2, 5, 2, seed=2)
    gone = torch.full((5,), -math.inf, dtype=torch.float64)
    pairs = torch.full((1, 2, 3, 5), -math.inf, dtype=torch.float64)
    masks = {"keys": gone, "pairs": pairs, "booleans": gone > 0, "booleans of pairs": pairs > 0}
    for name, mask in masks.items():
        weight = [mask] if mask.is_floating_point() else []
        fixed = {} if weight else {"log_weight": mask}
        for backend in BACKENDS if name != "pairs" else ["reference"]:
            yield pytest.param(
                lambda q, k, v, *w, backend=backend, fixed=fixed: ops.attention(
                    q, k, v, backend=backend, **fixed, **weights(w)
                ),
                (query, key, value, *weight),
                (0.0, -math.inf),
                id=f"attention, {backend}, {name}",
            )
            yield pytest.param(
                lambda q, k, *w, backend=backend, fixed=fixed: (
                    ops.log_partition(q, k, backend=backend, **fixed, **weights(w)),
                ),
                (query, key, *weight),
                (-math.inf,),
                id=f"log_partition, {backend}, {name}",
            )
        yield pytest.param(
            lambda q, k, v, *w, fixed=fixed: ops.attention_moments(q, k, v, **fixed, **weights(w)),
            (query, key, value, *weight),
            (*(-math.inf if place in (1, 7, 10) else 0.0 for place in range(11)), -1),
            id=f"attention_moments, {name}",
        )
        yield pytest.param(
            lambda q, k, v, *w, fixed=fixed: (ops.fisher_vp(q, k, v, **fixed, **weights(w)),),
            (query, key, query.cos(), *weight),
            (0.0,),
            id=f"fisher_vp, {name}",
        )
    rows = draw(3, 4), draw(3, 4, seed=1), draw(2, 4, seed=2)
    for name, mask in {"keys": gone, "pairs": gone.expand(3, 5), "booleans": gone > 0}.items():
        yield pytest.param(
            lambda q, k, n, mask=mask: ops.info_nce(
                q, k, negatives=n, log_weight=mask, temperature=0.5, return_log_partition=True
            ),
            rows,
            (0.0, -math.inf),
            id=f"info_nce, {name}",
        )
    yield pytest.param(
        lambda q, k: (
            ops.random_feature_log_partition(
                q, k, generator=torch.Generator(), features=3, log_weight=gone, standard_error=False
            ).log_partition,
        ),
        (query, key),
        (-math.inf,),
        id="random features",
    )
    yield pytest.param(
        lambda levels, means: Partial(levels - math.inf, means).reduce(0),
        (draw(2, 3), draw(2, 3, 4)),
        (-math.inf, 0.0),
        id="parts",
    )
    yield pytest.param(
        lambda h, w: ops.linear_cross_entropy(
            h, w, torch.tensor([-100, -100]), reduction="sum", bias=gone, return_log_partition=True
        ),
        (draw(2, 4), draw(5, 4, seed=1)),
        (0.0, -math.inf),
        id="linear_cross_entropy",
    )


def weights(given):
    return {"log_weight": given[0]} if given else {}


@every_row(("function", "leaves", "wanted"), list(nothing_visible()))
def test_trap_15_bug_8_where_nothing_is_visible_all_is_defined(function, leaves, wanted):
    """Results are −inf or 0, and first and second derivatives are 0."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    found = function(*leaves)
    for result, number in zip(found, wanted, strict=True):
        assert (result == number).all()
    loss = sum((finite(result) + 1).square().sum() for result in found)
    assert loss.requires_grad
    first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    assert all((one == 0).all() for one in first)
    along = sum((one * draw(*one.shape, seed=9)).sum() for one in first)
    if along.requires_grad:
        second = torch.autograd.grad(along, leaves, allow_unused=True, materialize_grads=True)
        assert all((one == 0).all() for one in second)


def test_trap_15_a_store_of_hidden_atoms(tmp_path):
    gone = torch.full((2, 5), -math.inf, dtype=torch.float64)
    store = AtomStore.write(tmp_path / "store", [AtomBlock(draw(2, 5, 4), draw(2, 5, 3), gone)] * 2)
    query = draw(1, 2, 3, 4).requires_grad_()
    output, level = streaming.attention(query, store, block_size=3)
    assert (output == 0).all() and (level == -math.inf).all()
    (first,) = torch.autograd.grad(output.sum() + finite(level).sum(), query, create_graph=True)
    assert (first == 0).all()
    assert (torch.autograd.grad(first.sum(), query)[0] == 0).all()


# --- traps 32 to 35 --------------------------------------------------------------------------------------------------


def test_trap_32_the_share_of_one_draw_is_not_seen_in_an_empirical_variance():
    """At ‖q + k‖ = 4 the formula's error of a thousand features is 94; the spread of fifty estimates is below a tenth."""
    query = torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    found = [
        ops.random_feature_log_partition(
            query, query, generator=torch.Generator().manual_seed(seed), features=1000, scale=1.0
        )
        for seed in range(50)
    ]
    formula = math.sqrt(math.expm1(16.0) / 1000)
    close(found[0].standard_error, torch.full((1, 1, 1), formula, dtype=torch.float64), rtol=1e-9, atol=0)
    ratios = torch.stack([one.log_partition - 4.0 for one in found]).exp()
    assert float(ratios.std()) < 0.1 * formula
    assert float(ratios.log().mean()) < -0.1


@pytest.mark.medium
def test_trap_34_attention_over_a_sample_is_biased_by_one_over_its_size():
    """S15 for keys ~ N(0, Σ): bias −exp(β²qᵀΣq)·βΣq/N to leading order, by antithetic samples of keys."""
    beta, query = 0.8, torch.tensor([0.7, -0.4], dtype=torch.float64)
    factor = torch.tensor([[1.0, 0.0], [0.3, 0.8]], dtype=torch.float64)
    covariance = factor @ factor.T
    level = math.exp(beta**2 * float(query @ covariance @ query))
    population, count, repeats = beta * covariance @ query, 100, 20_000
    key = draw(repeats, 1, count, 2, seed=3) @ factor.T
    # Σ_n (key_n − mean) has mean 0 and takes most of the noise that is linear in the sample.
    output = ops.attention(query.expand(repeats, 1, 1, 2), key, key, scale=beta).output[:, 0, 0]
    linear = (key[:, 0] - population) * (key[:, 0] @ query * beta - beta**2 * query @ covariance @ query / 2).exp()[
        ..., None
    ]
    sample = count * (output - population - linear.mean(1))
    error = sample.std(0) / math.sqrt(repeats)
    bias = -level * population
    assert ((sample.mean(0) - bias).abs() < 4 * error + 0.15 * bias.abs()).all()
    assert (sample.mean(0).abs() > 10 * error).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_35_query_heads_side_by_side_share_a_key_head(backend):
    """Head h is on key head h // G, and not on h % Hk: with keys that differ the two cannot be confused."""
    query, key, value = draw(1, 6, 3, 4), draw(1, 2, 5, 4, seed=1), draw(1, 2, 5, 3, seed=2)
    found = ops.attention(query, key, value, backend=backend)
    for head in range(6):
        scores = query[0, head] @ key[0, head // 3].mT / 2
        close(found.output[0, head], torch.softmax(scores, -1) @ value[0, head // 3])
        close(found.log_partition[0, head], torch.logsumexp(scores, -1))


def rotated(tensor, positions):
    """Rotary positions: pairs (x_i, x_{i+D/2}) turned by position·frequency."""
    half = tensor.shape[-1] // 2
    angle = positions[:, None] * 10.0 ** -torch.arange(half, dtype=torch.float64)
    one, other = tensor[..., :half], tensor[..., half:]
    return torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1)


def test_trap_35_rotary_scores_are_those_of_the_offset_and_gains_belong_to_the_other_side():
    query, key = draw(1, 2, 5, 6), draw(1, 2, 5, 6, seed=1)
    places = torch.arange(5, dtype=torch.float64)
    wanted = torch.empty(1, 2, 5, 5, dtype=torch.float64)
    for offset in range(-4, 5):  # the score matrix by its diagonals: q_iᵀ R_{j−i} k_j
        turned = rotated(key, torch.full((5,), float(offset), dtype=torch.float64))
        rows = torch.arange(max(0, -offset), min(5, 5 - offset))
        wanted[..., rows, rows + offset] = (query[..., rows, :] * turned[..., rows + offset, :]).sum(-1)
    found = ops.log_partition(rotated(query, places), rotated(key, places), scale=0.3)
    close(found, torch.logsumexp(0.3 * wanted, -1))
    moved = ops.log_partition(rotated(query, places + 7), rotated(key, places + 7), scale=0.3)
    close(moved, found)
    gain = draw(6, seed=2).exp()
    close(ops.log_partition(query, key * gain), ops.log_partition(query * gain, key))
