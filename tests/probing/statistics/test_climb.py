"""Steps, slopes, write norms, cosines and clouds against formulas written out here on the model's own submodules."""

import signal

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from tests.support.probing import zoo
from tests.support.probing.readings import climb_of, expansion_of, maps_of

import massieu
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.checks.check import first_look
from massieu.probing.reading.options import Options
from massieu.probing.reading.reading import Reading
from massieu.probing.statistics import climb as climb_file
from massieu.probing.statistics import expansion as expansion_file
from massieu.probing.statistics.climb import CONTROL_SHARE, MOVERS, PARTS, Climb, first_control_query
from massieu.probing.statistics.registry import CLIMB, EXPANSION, MAPS, VALUES
from massieu.probing.stream import replay as replay_file
from massieu.probing.sums.units import Units

GROUPS = frozenset({CLIMB, MAPS, EXPANSION, VALUES})
LAYER = 1


def read(name: str) -> tuple[Reading, torch.nn.Module, dict]:
    """One sequence, all of its positions sampled, in float64."""
    model = zoo.fresh(name, num_hidden_layers=2).double()
    batch = zoo.inputs(name, rows=1)
    sites = first_look(model, batch).sites
    reading = Reading(model, sites, Options(GROUPS, Units(), 20, climb_queries=20))
    reading.forward(batch, None, sampled=[0], windows=[0])
    return reading, model, batch


class Layer:
    """One attention layer of a model by hand: queries at any point of the stream, frozen keys, writes per head."""

    def __init__(self, name: str, model: torch.nn.Module, batch: dict) -> None:
        self.name = name
        seen = {}
        module = {"bert": lambda: model.encoder.layer[LAYER], "gpt2": lambda: model.h[LAYER],
                  "llama": lambda: model.layers[LAYER]}[name]()  # fmt: skip
        self.block = module
        handle = module.register_forward_pre_hook(
            lambda m, a, k: seen.update(state=a[0] if a else k["hidden_states"], **k), with_kwargs=True
        )
        with torch.no_grad():
            model(**batch)
        handle.remove()
        self.residual = seen["state"]
        self.rotary = seen.get("position_embeddings")
        self.key = self._project(self.residual)[1]
        scores = self.scores(self.residual)
        weights = torch.softmax(scores, -1)
        value = self._project(self.residual)[2]
        self.output = weights @ value  # 1 H L Dv
        self.writes = torch.einsum("bhlv,hdv->hbld", self.output, self._output_weight())

    def _split(self, x, heads):
        return x.unflatten(-1, (heads, 12)).transpose(1, 2)

    def _project(self, residual):
        block = self.block
        if self.name == "bert":
            attention = block.attention.self
            return [self._split(m(residual), 4) for m in (attention.query, attention.key, attention.value)]
        if self.name == "gpt2":
            return [self._split(t, 4) for t in block.attn.c_attn(block.ln_1(residual)).split(48, 2)]
        x, attention = block.input_layernorm(residual), block.self_attn
        q, k, v = (
            self._split(attention.q_proj(x), 4),
            self._split(attention.k_proj(x), 2),
            self._split(attention.v_proj(x), 2),
        )
        cos, sin = (t[:, None].double() for t in self.rotary)

        def turn(t):
            return t * cos + torch.cat([-t[..., 6:], t[..., :6]], -1) * sin

        return [turn(q), turn(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)]

    def _output_weight(self):
        block = self.block
        weight = {"bert": lambda: block.attention.output.dense.weight, "gpt2": lambda: block.attn.c_proj.weight.T,
                  "llama": lambda: block.self_attn.o_proj.weight}[self.name]()  # fmt: skip
        return weight.detach().unflatten(1, (4, 12)).transpose(0, 1)

    def bias(self):
        block = self.block
        return {"bert": lambda: block.attention.output.dense.bias, "gpt2": lambda: block.attn.c_proj.bias,
                "llama": lambda: None}[self.name]()  # fmt: skip

    def scores(self, residual):
        scores = self._project(residual)[0] @ self.key.mT / 12**0.5
        if self.name == "bert":
            return scores
        return scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)

    def parts(self, residual):
        """Selective part, common part and log Z of every head and query."""
        scores = self.scores(residual)
        log_z = torch.logsumexp(scores, -1)
        visible = scores > -torch.inf
        common = torch.where(visible, scores, 0).sum(-1) / visible.sum(-1)
        return torch.stack([log_z - visible.sum(-1).log() - common, common, log_z])

    @torch.no_grad()
    def change(self, step):
        return self.parts(self.residual + step) - self.parts(self.residual)

    @torch.no_grad()
    def slope(self, step):
        """By forward-mode differentiation (the norms of some models round to float32, which spoils differences)."""
        return torch.func.jvp(self.parts, (self.residual,), (step.detach(),))[1]


@pytest.fixture(params=["bert", "gpt2", "llama"], scope="module")
def case(request):
    reading, model, batch = read(request.param)
    return climb_of(reading)[LAYER], Layer(request.param, model, batch), reading


def part(climb, mover, name):
    """A number of one mover; "random" is the random direction as long as the own write."""
    if mover == "random":
        return climb.random.value()[0, PARTS.index(name)]
    return climb.steps.value()[MOVERS.index(mover), PARTS.index(name)]


def test_own_write(case):
    climb, layer, _ = case
    for h in range(4):
        change = layer.change(layer.writes[h])[:, 0, h]
        slope = layer.slope(layer.writes[h])[:, 0, h]
        assert np.isclose(part(climb, "own_write", "step_selective")[h], change[0].mean(), atol=1e-9)
        assert np.isclose(part(climb, "own_write", "step_common")[h], change[1].mean(), atol=1e-9)
        assert np.isclose(part(climb, "own_write", "step_log_partition")[h], change[2].mean(), atol=1e-9)
        assert np.isclose(part(climb, "own_write", "step_sharpens")[h], (change[0] > 0).double().mean())
        assert np.isclose(part(climb, "own_write", "slope_selective")[h], slope[0].mean(), rtol=1e-5, atol=1e-7)
        assert np.isclose(part(climb, "own_write", "slope_common")[h], slope[1].mean(), rtol=1e-5, atol=1e-7)
        assert abs(part(climb, "own_write", "sharpens")[h] - float((slope[0] > 0).double().mean())) <= 1 / 20 + 1e-12


def test_selective_and_common_part_add_up_to_raw_log_z(case):
    climb, *_ = case
    for mover in ("own_write", "update", "random"):
        total = part(climb, mover, "step_selective") + part(climb, mover, "step_common")
        assert np.allclose(total, part(climb, mover, "step_log_partition"), atol=1e-10)


def test_other_heads_writes(case):
    climb, layer, _ = case
    pairs = climb.pairs.value()
    few = torch.arange(3, 20, CONTROL_SHARE)
    for g in range(4):
        change, slope = layer.change(layer.writes[g])[0, 0], layer.slope(layer.writes[g])[0, 0]
        assert np.allclose(pairs[3, g], change[:, few].mean(-1), atol=1e-9)
        assert np.allclose(pairs[2, g], (change[:, few] > 0).double().mean(-1))
        assert np.allclose(pairs[1, g], slope.mean(-1), rtol=1e-5, atol=1e-7)
    mean, deviation, number = climb.mismatched("step_selective")
    others = np.array([[pairs[3, g, h] for g in range(4) if g != h] for h in range(4)])
    assert number == 3
    assert np.allclose(mean, others.mean(1))
    assert np.allclose(deviation, others.std(1, ddof=1))


def test_control_queries_see_as_many_keys_as_the_others():
    """Of sorted positions in a causal window, the mean number of keys is that of all, within half of the step."""
    for count in range(1, 300):
        chosen = range(count)[first_control_query(count) :: CONTROL_SHARE]
        assert chosen
        assert abs(sum(chosen) / len(chosen) - (count - 1) / 2) <= CONTROL_SHARE / 2


def test_attention_update_with_and_without_output_bias(case):
    climb, layer, _ = case
    without = layer.writes.sum(0)
    bias = layer.bias()
    whole = without if bias is None else without + bias.detach()
    assert np.allclose(part(climb, "update", "step_selective"), layer.change(whole)[0, 0].mean(-1), atol=1e-9)
    assert np.allclose(
        part(climb, "update", "slope_selective"), layer.slope(whole)[0, 0].mean(-1), rtol=1e-5, atol=1e-7
    )
    if bias is None:
        assert (climb.steps.estimate().count[MOVERS.index("update_without_bias")] == 0).all()
    else:
        found = part(climb, "update_without_bias", "step_selective")
        assert np.allclose(found, layer.change(without)[0, 0].mean(-1), atol=1e-9)


def test_write_norm(case):
    _, layer, reading = case
    expected_ratio = (layer.writes.norm(dim=-1) / layer.residual.norm(dim=-1)).mean((1, 2))
    rows = {row.place.order: row.estimate.value for row in reading.rows() if row.name == "write_norm_ratio"}
    assert np.allclose(rows[LAYER], expected_ratio.detach(), atol=1e-10)


def test_random_control_has_the_length_of_the_write_and_no_preference(case):
    """A random direction raises S to first order as often as it lowers it: within 5 standard errors of one half."""
    climb, _, reading = case
    shares = np.stack([part(climb, "random", "sharpens") for climb in climb_of(reading)])
    number = (
        climb_of(reading)[0].random.estimate().count[0, 0, 0] * shares.size / 4
    )  # one direction serves all four heads
    assert abs(shares.mean() - 0.5) <= 5 * 0.5 / np.sqrt(number)


def test_without_a_norm_between_a_random_step_or_its_opposite_sharpens(case):
    """S is convex in the query, so that the mean over ±Δ lies above S(r) (Jensen) where queries are affine in the stream.

    BERT's are; GPT-2's and Llama's lie behind a norm, and there some pairs of steps flatten both ways.
    """
    _, layer, _ = case
    generator = torch.Generator().manual_seed(3)
    lowest = []
    for _ in range(8):
        step = torch.randn(layer.residual.shape, generator=generator).double() * layer.residual.std()
        both = layer.change(step)[0] + layer.change(-step)[0]
        lowest.append(float(both.min()))
    assert (min(lowest) >= -1e-12) == (layer.name == "bert")


def test_ascent_along_the_heads_own_gradient_always_climbs():
    """S12(a): with W_O W_V = W_QᵀW_K the whole step raises raw log Z of a bare head at every query (convexity)."""
    model = zoo.fresh("bert", num_hidden_layers=2).double()
    block = model.encoder.layer[LAYER].attention
    attention = block.self
    with torch.no_grad():
        for parameter in (attention.query.bias, attention.key.bias, attention.value.bias, block.output.dense.bias):
            parameter.zero_()
        attention.value.weight.copy_(attention.key.weight)
        block.output.dense.weight.copy_(attention.query.weight.T)
    batch = zoo.inputs("bert", rows=1)
    sites = first_look(model, batch).sites
    reading = Reading(model, sites, Options(GROUPS, Units(), 20, climb_queries=20))
    reading.forward(batch, None, sampled=[0], windows=[0])
    assert (part(climb_of(reading)[LAYER], "own_write", "step_log_partition") > 0).all()
    assert np.allclose(np.diag(maps_of(reading)[LAYER].values["write_score_cosine"]), 1.0, atol=1e-12)


def test_cosines_and_symmetric_shares_from_full_matrices(case):
    _, layer, reading = case
    name = layer.name
    block = layer.block
    gain = torch.ones(48).double()
    if name == "bert":
        q, k, v = (m.weight for m in (block.attention.self.query, block.attention.self.key, block.attention.self.value))
    elif name == "gpt2":
        q, k, v = block.attn.c_attn.weight.T.split(48)
        gain = block.ln_1.weight
    else:
        q, k, v = (m.weight for m in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj))
        k, v = (t.unflatten(0, (2, 12)).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v))
        gain = block.input_layernorm.weight
    q, k, v = ((t * gain).detach().unflatten(0, (4, 12)) for t in (q, k, v))
    out = layer._output_weight()
    maps = maps_of(reading)[LAYER]
    for g in range(4):
        for h in range(4):
            write, score = out[g] @ v[g], q[h].T @ k[h]
            expected_cosine = (write * score).sum() / (write.norm() * score.norm())
            assert np.isclose(maps.values["write_score_cosine"][g, h], expected_cosine, atol=1e-6)
    for h in range(4):
        score = q[h].T @ k[h]
        symmetric = ((score + score.T) / 2).norm() ** 2 / score.norm() ** 2
        assert np.isclose(maps.values["symmetric_share"][h], symmetric, atol=1e-6)


def test_the_rotation_null_by_simulation(case):
    """The deviation of the cosine of two fixed matrices after random rotations on both sides is the one that is told."""
    *_, reading = case
    generator = np.random.default_rng(0)
    size, draws = 6, 2000
    left, right = generator.normal(size=(2, size, size))
    turns, triangles = np.linalg.qr(generator.normal(size=(2, draws, size, size)))
    before, after = turns * np.sign(np.diagonal(triangles, axis1=-2, axis2=-1))[..., None, :]
    turned = before @ left @ after
    cosines = (turned * right).sum((1, 2)) / np.linalg.norm(left) / np.linalg.norm(right)
    told = maps_of(reading)[LAYER].rotation_deviation * 48  # of the model's width; that of a matrix of one number
    assert abs(np.std(cosines) * size - told) < 5 / np.sqrt(2 * draws)


def test_clouds_along_the_depth():
    """Distances by SciPy and spectra by an SVD of the centred tokens, for one window of distinct tokens."""
    model = zoo.fresh("bert").double()
    batch = {"input_ids": torch.arange(3, 23)[None], "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    sites = first_look(model, batch).sites
    reading = Reading(model, sites, Options(GROUPS, Units(), 20, climb_queries=20))
    reading.forward(batch, None, sampled=[0], windows=[0])
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    for layer, name in enumerate(["encoder.layer.0 attention", "encoder.layer.1 attention"]):
        rows = {row.name: row.estimate.value[0] for row in reading.rows() if row.place.name == name}
        cloud = states[layer][0].numpy()
        centred = cloud - cloud.mean(0)
        spectrum = np.linalg.svd(centred, compute_uv=False)[:19] ** 2 / 20
        shares = spectrum / spectrum.sum()
        assert np.isclose(rows["pairwise_distance/before"], pdist(cloud).mean(), rtol=1e-10)
        assert np.isclose(rows["log_determinant/before"], np.log(spectrum).mean(), rtol=1e-8)
        assert np.isclose(rows["effective_rank/before"], np.exp(-(shares * np.log(shares)).sum()), rtol=1e-8)


def test_repeated_tokens_are_counted_once():
    """Two equal tokens are one point of a model without position vectors; the cloud is made of distinct tokens."""
    model = zoo.fresh("llama")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14] * 2])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    sites = first_look(model, batch).sites
    reading = Reading(model, sites, Options(GROUPS, Units(), 20, climb_queries=20))
    reading.forward(batch, None, sampled=[0], windows=[0])
    first = (row for row in reading.rows() if row.place.scope == "layer" and row.place.order == 0)
    rows = {row.name: row.estimate.value[0] for row in first}
    # With both copies, ten of nineteen directions would be empty: < −13 on average.
    assert rows["log_determinant/before"] > -20


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    sorted({"modernbert", "gpt_oss", "t5", "bart", "albert", "qwen3", "gemma2", "vit", "swin"} & zoo.MAKERS.keys()),
)
def test_other_architectures_give_numbers_or_a_reason(name):
    fewer_layers = {} if name in ("bart", "t5", "swin") else {"num_hidden_layers": 2}
    model = zoo.model(name, **fewer_layers)
    batch = zoo.inputs(name, padded=True)
    sites = first_look(model, batch).sites
    reading = Reading(model, sites, Options(GROUPS, Units(), 20, climb_queries=2))
    reading.forward(batch, None, sampled=[0, 2], windows=range(3))
    for info, climb in zip(reading.sites, climb_of(reading), strict=True):
        unavailable = reading.unavailable(info)
        if CLIMB in unavailable:
            assert name == "swin"
            continue
        assert np.isfinite(part(climb, "update", "step_selective")).all()
        has_own_writes = np.isfinite(part(climb, "own_write", "step_selective")).all()
        assert has_own_writes or "own_write" in unavailable
        assert info.index in maps_of(reading) or MAPS in unavailable


def _sums_of(reading: Reading) -> list[np.ndarray]:
    names = ("steps", "random", "pairs")
    estimates = [getattr(climb, name).estimate() for climb in climb_of(reading) for name in names]
    estimates += [ratio.estimate() for ratio in expansion_of(reading).sublayers.values()]
    return [array for estimate in estimates for array in (estimate.value, estimate.count)]


@pytest.mark.medium
def test_pieces_of_bounded_size_are_one_row_with_the_same_numbers(monkeypatch):
    """As for thousands of heads: no more queries at a time than the bound allows, and never fewer than one control."""
    whole = _sums_of(read("llama")[0])
    pieces, sums = [], Climb.sums
    monkeypatch.setattr(Climb, "sums", lambda self: (pieces.append(len(self.positions)), sums(self))[1])
    clouds, spectrum = [], expansion_file.observables.covariance_spectrum
    monkeypatch.setattr(
        expansion_file.observables, "covariance_spectrum", lambda cloud: (clouds.append(len(cloud)), spectrum(cloud))[1]
    )
    monkeypatch.setattr(climb_file, "NUMBERS_PER_PIECE", 1)
    monkeypatch.setattr(expansion_file, "NUMBERS_PER_PIECE", 3 * 20 * 48)
    reading = read("llama")[0]
    assert pieces == [8, 8, 4] * len(reading.sites)
    assert max(clouds) <= 3 < sum(clouds)
    for climb in climb_of(reading):
        assert climb.steps.error_unit()[1] == 1
    for mine, expected in zip(_sums_of(reading), whole, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.medium
def test_a_last_piece_that_is_too_short_for_a_control_query_joins_the_one_before(monkeypatch):
    model, batch = zoo.model("gpt2", num_hidden_layers=1), zoo.inputs("gpt2", rows=1, seed=0)
    short = {name: rows[:, :18] for name, rows in batch.items()}
    whole = massieu.probe(model, [short], statistics=["climb"], draws=2).heads
    pieces, sums = [], Climb.sums
    monkeypatch.setattr(Climb, "sums", lambda self: (pieces.append(len(self.positions)), sums(self))[1])
    monkeypatch.setattr(climb_file, "NUMBERS_PER_PIECE", 1)
    split = massieu.probe(model, [short], statistics=["climb"], draws=2).heads
    assert set(zip(pieces[::2], pieces[1::2], strict=True)) == {(8, 10)}
    np.testing.assert_allclose(split["value"], whole["value"], rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_an_interruption_between_pieces_keeps_whole_windows_only(monkeypatch):
    """Ctrl-C while the heads of the second batch climb: that batch is the last, and counts as one."""
    model = zoo.model("gpt2", num_hidden_layers=1)
    batches = [zoo.inputs("gpt2", rows=1, seed=seed) for seed in range(3)]
    monkeypatch.setattr(climb_file, "NUMBERS_PER_PIECE", 1)
    calls, sums = [], Climb.sums

    def interrupted(self: Climb) -> climb_file.ClimbSums:
        calls.append(len(calls))
        if len(calls) == 2 + 2 * 3 * len(expected.run.sites):  # the second batch's second piece, after the control's
            signal.raise_signal(signal.SIGINT)
        return sums(self)

    expected = massieu.probe(model, massieu.Batches(batches[:2], window=20), statistics=["climb"])
    monkeypatch.setattr(Climb, "sums", interrupted)
    result = massieu.probe(model, massieu.Batches(batches, window=20), statistics=["climb"])
    assert not result.complete
    assert result.run.text.windows == 2
    assert result.heads.equals(expected.heads)


def _call(log_weight: torch.Tensor | None, softcap: float | None = None, sink: bool = False) -> AttentionCall:
    """A call of four query heads on two key heads, in float64."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return AttentionCall(
        site=AttentionSite("attention"), module=torch.nn.Identity(), query=normal(2, 4, 5, 3), key=normal(2, 2, 7, 3),
        value=normal(2, 2, 7, 3), log_weight=log_weight, is_causal=False, scale=0.7, softcap=softcap,
        sink=normal(4) if sink else None, output=normal(2, 5, 4, 3),
    )  # fmt: skip


CAUSAL = torch.ones(5, 7, dtype=torch.bool).tril()[None, None]
BIAS = torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


@pytest.mark.parametrize(
    "call",
    [
        _call(None),
        _call(CAUSAL),
        _call(CAUSAL, softcap=2.0),
        _call(BIAS),
        _call(BIAS.masked_fill(~CAUSAL, -torch.inf), sink=True),
        _call(BIAS.masked_fill(~CAUSAL, torch.finfo(torch.float32).min), softcap=2.0, sink=True),
        _call(BIAS[:, :1, :1]),
    ],
    ids=["all keys", "mask", "mask and cap", "bias", "bias, mask and sink", "mask of numbers", "bias of keys"],
)
def test_parts_and_slopes_of_moved_queries(call: AttentionCall) -> None:
    """Two moved versions of some queries, and the derivatives at the call's own, against explicit logits of every pair."""
    log_weight = torch.zeros(1, 1, 1, 7, dtype=torch.float64) if call.log_weight is None else call.log_weight
    if log_weight.dtype == torch.bool:
        log_weight = torch.zeros(log_weight.shape, dtype=torch.float64).masked_fill(~log_weight, -torch.inf)
    log_weight = log_weight.expand(2, 4, 5, 7)
    key = call.key.repeat_interleave(2, 1)

    def parts(query: torch.Tensor, queries: torch.Tensor) -> list[torch.Tensor]:
        scores = 0.7 * query @ key.mT
        scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
        prior = log_weight[:, :, queries]
        raw = torch.logsumexp(scores + prior, -1)
        common = (prior.softmax(-1) * scores).sum(-1)
        if call.sink is not None:
            raw = torch.logaddexp(raw, call.sink[None, :, None])
        return [torch.logsumexp(scores + prior, -1) - common, common, raw]

    landscape = climb_file._Landscape.of(call)
    queries = torch.tensor([1, 4])
    moved = call.query[:, :, queries].repeat(1, 1, 2, 1) * torch.tensor([1.0, 1.0, 1.3, 1.3])[:, None]
    # Selective log Z is meant up to a constant of the query: of changes between the versions nothing is left of it.
    for ours, theirs in zip(landscape.parts(moved, queries, 2), parts(moved, queries.repeat(2)), strict=True):
        torch.testing.assert_close(ours[:, :, 2:] - ours[:, :, :2], theirs[:, :, 2:] - theirs[:, :, :2])

    query = call.query.clone().requires_grad_()
    for index, slope in enumerate(landscape.slopes(call.query)):
        expected = torch.autograd.grad(parts(query, torch.arange(5))[index].sum(), query)[0]
        torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_the_only_key_leaves_nothing_selective(hidden: float) -> None:
    """Where a query sees one key, attention is that key: no step sharpens it, and rounding does not seem to."""
    only = torch.eye(7, dtype=torch.bool)[None, None, :5]
    call = _call(BIAS.masked_fill(~only, hidden))
    landscape = climb_file._Landscape.of(call)
    moved = torch.cat([call.query, call.query * 1.7 + 3], dim=2)
    assert not landscape.parts(moved, slice(None), 2)[0].any()
    assert not landscape.slopes_and_parts(call.query)[1][0].any()
    assert landscape.slopes(call.query)[0].abs().max() <= 1e-14


def test_a_query_that_sees_no_key_has_no_parts() -> None:
    """Its log Z is −∞ and nothing else is defined; the other queries keep their numbers."""
    mask = CAUSAL.clone()
    mask[..., 2, :] = False
    selective, common, raw = climb_file._Landscape.of(_call(mask)).parts(_call(mask).query)
    blind = torch.tensor([False, False, True, False, False])
    assert (raw[:, :, blind] == -torch.inf).all()
    assert selective[:, :, blind].isnan().all()
    assert common[:, :, blind].isnan().all()
    rest = climb_file._Landscape.of(_call(CAUSAL)).parts(_call(CAUSAL).query)
    for ours, theirs in zip((selective, common, raw), rest, strict=True):
        torch.testing.assert_close(ours[:, :, ~blind], theirs[:, :, ~blind])


def test_maps_among_weights_are_looked_for_once_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The climb and the maps' statistics ask for the same ones."""
    looked: list[torch.nn.Module] = []
    honest = replay_file.maps_among_weights

    def counting(module: torch.nn.Module, *arguments: object):
        looked.append(module)
        return honest(module, *arguments)

    monkeypatch.setattr(replay_file, "maps_among_weights", counting)
    read("bert")
    assert len(looked) == len(set(looked)) == 2
