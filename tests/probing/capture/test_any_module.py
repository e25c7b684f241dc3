"""`probe` and `describe` for modules that no library knows: what is read equals explicit attention in float64."""

import copy
import dataclasses
from collections import OrderedDict

import polars
import pytest
import torch
from tests.support.probing import plain, zoo
from torch import nn

import massieu
from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.checks.check import self_check_error
from massieu.probing.model.forward import named_inputs, output_tensor, real_mask
from massieu.probing.model.fresh import reinitialised

STATISTICS = ["entropy", "selective_log_partition", "weight_first"]
ROWS, LENGTH = 3, 10


def states(seed=1, rows=ROWS, length=LENGTH):
    return torch.randn(rows, length, plain.WIDTH, generator=torch.Generator().manual_seed(seed))


def ids(seed=1, rows=ROWS, length=LENGTH):
    return torch.randint(0, 31, (rows, length), generator=torch.Generator().manual_seed(seed))


def numbers(result, statistic, site):
    rows = result.heads.filter((polars.col("statistic") == statistic) & (polars.col("site") == site))
    return torch.tensor(rows.sort("head")["value"].to_list(), dtype=torch.float64)


def attention_inputs(model, site, batch):
    """What the attention module at a site is given, as the model runs by itself."""
    seen = []
    handle = model.get_submodule(site).register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return seen[0]


def check_equal(result, site, expected, real=None):
    for name in STATISTICS:
        means = (
            expected[name].mean((0, 2)) if real is None else (expected[name] * real[:, None]).sum((0, 2)) / real.sum()
        )
        assert torch.allclose(numbers(result, name, site), means, rtol=0, atol=1e-5), name


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_encoder_of_pytorch_equals_explicit_attention(batch_first, norm_first):
    model, tokens = plain.encoder(batch_first=batch_first, norm_first=norm_first), states()
    batch = tokens if batch_first else tokens.transpose(0, 1)
    result = massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=STATISTICS, draws=0)
    for site in ("layers.0.self_attn", "layers.1.self_attn"):
        module = model.get_submodule(site)
        given = attention_inputs(model, site, batch)
        given = given if batch_first else given.transpose(0, 1)
        check_equal(result, site, plain.attention(given, module.in_proj_weight, module.in_proj_bias))
    assert {(site.route, site.grade, site.kind) for site in result.run.sites} == {("tap", "full", "self")}
    assert result.run.text.windows == ROWS


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": False}, {"fused": True, "sequential": True}])
def test_a_gpt_written_by_hand_equals_explicit_attention(options):
    model, batch = plain.gpt(**options), ids()
    result = massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=STATISTICS, draws=0)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for index in range(2):
        site = f"blocks.{index}.attention"
        module = model.get_submodule(site)
        given = attention_inputs(model, site, batch)
        check_equal(result, site, plain.attention(given, module.qkv.weight, module.qkv.bias, later))
    assert [(site.name, site.layer, site.kind) for site in result.run.sites] == [
        ("blocks.0.attention", 0, "causal"), ("blocks.1.attention", 1, "causal"),
    ]  # fmt: skip


_STEPS = {
    True: ["norm", "attention", "norm", "feed_forward"] * 2,
    False: ["attention", "norm", "feed_forward", "norm"] * 2,
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_wiring_of_an_encoder(batch_first, norm_first):
    tokens = states(length=12)
    found = massieu.describe(
        plain.encoder(batch_first=batch_first, norm_first=norm_first), tokens if batch_first else tokens.transpose(0, 1)
    )
    assert [step.kind for step in found.sublayers] == _STEPS[norm_first]
    assert [step.layer for step in found.sublayers] == [0] * 4 + [1] * 4
    assert (found.unavailable, found.warnings) == ([], [])


@pytest.mark.medium
def test_an_encoder_is_one_whichever_dimension_is_first():
    tokens = states(length=12)
    tables = [
        massieu.probe(plain.encoder(batch_first=batch_first), massieu.Batches([batch], window=12)).table
        for batch_first, batch in ((True, tokens), (False, tokens.transpose(0, 1)))
    ]
    assert "own_write_slope_selective" in set(tables[0]["statistic"])
    assert "write_score_cosine" in set(tables[0]["statistic"])
    columns = ["scope", "site", "layer", "head", "statistic", "count"]
    assert tables[0].select(columns).equals(tables[1].select(columns))
    exact = ~tables[0]["statistic"].str.contains("sharpens|q_value")  # shares jump where a sign is at rounding
    values = [torch.tensor(table.filter(exact)["value"].to_list(), dtype=torch.float64) for table in tables]
    assert torch.allclose(*values, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_the_steps_of_a_gpt_written_by_hand():
    for sequential in (False, True):
        found = massieu.describe(plain.gpt(sequential=sequential), ids())
        kinds = [(step.name.rsplit(" ", 1)[-1], step.kind) for step in found.sublayers]
        own = [("blocks.0.first", "norm"), ("attention", "attention"), ("blocks.0.second", "norm")]
        assert kinds[:4] == [*own, ("feed-forward", "feed_forward")]
        assert kinds[-1] == ("norm", "norm")
        assert found.unavailable == []


@pytest.mark.parametrize("nested", [False, True])
def test_padding_by_pytorchs_own_mask_is_left_out(nested):
    model, tokens = plain.encoder(), states()
    model.use_nested_tensor = model.enable_nested_tensor = nested
    hidden = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    hidden[1, 7:] = hidden[2, 5:] = True
    batch = {"src": tokens, "src_key_padding_mask": hidden}
    result = massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=STATISTICS, draws=0)
    module = model.get_submodule("layers.0.self_attn")
    expected = plain.attention(tokens, module.in_proj_weight, module.in_proj_bias, hidden[:, None, None])
    check_equal(result, "layers.0.self_attn", expected, real=~hidden)
    entropy = result.heads.filter(polars.col("statistic") == "entropy")
    assert set(entropy["count"]) == {int((~hidden).sum())}


@pytest.mark.medium
def test_as_many_items_as_tokens_are_told_apart_by_batch_first():
    tokens, names = states(length=4, rows=4), ["entropy", "effective_rank"]
    for batch_first in (True, False):
        model = plain.encoder(batch_first=batch_first)
        together = tokens if batch_first else tokens.transpose(0, 1)
        apart = tokens.split(1, dim=0) if batch_first else together.split(1, dim=1)
        data = [massieu.Batches(each, window=4) for each in ([together], apart)]
        tables = [massieu.probe(model, each, statistics=names).table for each in data]
        own = [table.filter(~polars.col("statistic").str.contains("/reinit|/p_value|/q_value")) for table in tables]
        assert own[0].select("site", "statistic", "count").equals(own[1].select("site", "statistic", "count"))
        values = [torch.tensor(table["value"].to_list(), dtype=torch.float64) for table in own]
        assert torch.allclose(*values, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_where_nothing_tells_items_and_tokens_apart_the_stream_is_left_out_with_the_reason():
    asked = ["entropy", "climb", "expansion"]
    result = massieu.probe(plain.gpt(), massieu.Batches([ids(rows=6, length=6)], window=6), statistics=asked)
    assert [entry.statistic for entry in result.run.unavailable if entry.of == "model"] == ["expansion"]
    assert "as many items as tokens" in result.run.unavailable[0].reason
    assert "as many items as tokens" in result.run.sites[0].unavailable["climb"]
    assert numbers(result, "entropy", "blocks.0.attention").isfinite().all()


def test_an_encoder_and_decoder_of_pytorch():
    torch.manual_seed(0)
    model = plain.sharp(nn.Transformer(plain.WIDTH, plain.HEADS, 1, 1, 32, batch_first=True))
    found = massieu.describe(model, (states(), states(2)))
    assert [(site.name, site.kind) for site in found.sites] == [
        ("encoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.multihead_attn", "cross"),  # of as many keys as queries
    ]
    assert [site.query_tokens for site in found.sites] == ["text", "decoder", "decoder"]
    assert [site.key_tokens for site in found.sites] == ["text", "decoder", "text"]
    kinds = [step.kind for step in found.sublayers if step.kind != "norm"]
    assert kinds == ["attention", "feed_forward", "attention", "cross_attention", "feed_forward"]


def test_one_attention_by_itself_and_without_a_batch():
    torch.manual_seed(0)
    model = plain.sharp(nn.MultiheadAttention(plain.WIDTH, plain.HEADS, batch_first=True))
    tokens = states(rows=1)
    for batch in ((tokens,) * 3, (tokens[0],) * 3):
        result = massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=STATISTICS, draws=0)
        check_equal(result, "(the module itself)", plain.attention(tokens, model.in_proj_weight, model.in_proj_bias))
        assert result.run.text.windows == 1


@pytest.mark.medium
def test_a_model_of_transformers_inside_another_module_gives_its_own_numbers():
    inner, batch = zoo.model("bert", num_hidden_layers=2), zoo.inputs("bert", rows=1, length=8)
    # Without the mask's name nothing says what is padding, so no token is.
    cases = ((inner, batch), (plain.Holder(inner).eval(), batch["input_ids"]))
    own, around = (
        massieu.probe(module, massieu.Batches([given], window=20), statistics=STATISTICS, draws=0)
        for module, given in cases
    )
    assert {site.route for site in around.run.sites} == {"interface"}
    assert [site.name for site in around.run.sites] == [f"inner.{site.name}" for site in own.run.sites]
    for site in own.run.sites:
        for name in STATISTICS:
            expected, found = numbers(own, name, site.name), numbers(around, name, f"inner.{site.name}")
            assert torch.allclose(expected, found, atol=1e-6)


def odd(*kinds):
    """A GPT whose blocks attend in these ways; None is the usual one."""
    torch.manual_seed(0)
    model = plain.Gpt(fused=False)
    for block, kind in zip(model.blocks, kinds, strict=True):
        block.attention = block.attention if kind is None else kind()
    return plain.sharp(model)


@pytest.mark.medium
def test_of_scores_alone_only_what_needs_no_more_is_given():
    model, batch = odd(plain.Curved, None), ids()
    result = massieu.probe(model, massieu.Batches([batch], window=LENGTH))
    first, second = result.run.sites
    assert [(site.route, site.grade) for site in (first, second)] == [("tap", "scores"), ("tap", "full")]
    assert "scores alone" in result.run.capture.route
    assert result.run.self_check.passed
    named = {
        site: set(table["statistic"].str.split("/").list.first()) for (site,), table in result.heads.group_by("site")
    }
    without = {
        "selective_log_partition",
        "largest_score",
        "largest_score_above_mean",
        "score_variance",
        "score_variance_attended",
    }
    assert not named[first.name] & without
    assert not any(name.startswith(("own_write", "update", "write_score", "symmetric")) for name in named[first.name])
    assert without < named[second.name]
    assert {*without, "climb", "maps"} < set(first.unavailable)
    module = model.get_submodule(first.name)
    given = attention_inputs(model, first.name, batch)
    query, key, value = (
        part.unflatten(2, (plain.HEADS, -1)).transpose(1, 2).double()
        for part in module.qkv(given).split(plain.WIDTH, 2)
    )
    scores = nn.functional.gelu(query @ key.mT / 2).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    weights = scores.softmax(-1)
    stream = attention_inputs(model, first.name.replace("attention", "first"), batch).double()
    written = torch.einsum(
        "bhlv,dhv->bhld", weights @ value, module.out.weight.double().unflatten(1, (plain.HEADS, -1))
    )
    for name, values in {
        "write_norm_ratio": written.norm(dim=-1) / stream.norm(dim=-1)[:, None],
        "entropy": torch.special.entr(weights).sum(-1),
        "log_partition": scores.logsumexp(-1),
        "weight_first": weights[..., 0],
        "largest_weight": weights.amax(-1),
        "effective_sample_size": 1 / weights.square().sum(-1),
    }.items():
        assert torch.allclose(numbers(result, name, first.name), values.mean((0, 2)), atol=1e-5), name
    window = result.details["examples"][0]["sites"]
    assert all(value is None for row in window["0"]["selective_log_partition"] for value in row)
    assert all(value >= 0 for row in window["1"]["selective_log_partition"] for value in row)


def test_the_self_check_compares_the_models_weights_where_its_output_has_no_known_layout():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 6, generator=generator).masked_fill(~torch.ones(5, 6).tril(1).bool(), -torch.inf)
    nothing = torch.zeros(1)
    call = AttentionCall(
        AttentionSite("a"), nn.Identity(), nothing.expand(2, 3, 5, 1), nothing.expand(2, 3, 6, 1), torch.empty(2, 3, 6, 0),
        scores, False, 1.0, None, None, torch.empty(2, 5, 3, 0), grade="scores", weights=scores.softmax(-1),
    )  # fmt: skip
    real = torch.ones(2, 5, dtype=torch.bool)
    assert self_check_error(call, real) < 1e-6
    assert self_check_error(dataclasses.replace(call, weights=(2 * scores).softmax(-1)), real) > 1e-2
    assert self_check_error(dataclasses.replace(call, weights=None), real) == float("inf")


def test_what_cannot_be_read_is_named_with_its_reason():
    result = massieu.probe(odd(plain.Mixed, None), massieu.Batches([ids()], window=LENGTH), statistics=["entropy"])
    (warning,) = result.run.warnings
    assert "blocks.0.attention is not read" in warning
    assert [site.name for site in result.run.sites] == ["blocks.1.attention"]
    with pytest.raises(
        InputError, match=r"none of the attention of Gpt can be read: blocks\.0\.attention \(.*\), blocks\.1"
    ) as e:
        massieu.probe(odd(plain.Mixed, plain.Mixed), [ids()])
    assert "\n" not in str(e.value)


def test_a_second_tensor_is_another_sequence_where_the_keys_are_made_of_it():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attention, self.cross = plain.Pair(False), plain.Pair(True)

        def forward(self, x, other):
            return self.cross(self.self_attention(x, other), other)

    torch.manual_seed(0)
    found = massieu.describe(plain.sharp(Both()), (states(), states(2)))
    assert [(site.name, site.kind) for site in found.sites] == [("self_attention", "self"), ("cross", "cross")]


def test_blocks_that_are_lists_and_projections_by_a_matrix():
    torch.manual_seed(0)
    found = massieu.describe(plain.sharp(plain.Nested()), states())
    kinds = [(step.layer, step.kind) for step in found.sublayers]
    assert kinds == [(layer, kind) for layer in (0, 1) for kind in ("norm", "attention", "norm", "feed_forward")]
    assert found.unavailable == []

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = plain.Pair(True)

        def forward(self, x):
            return x + self.attend(x, x)

    found = massieu.describe(plain.sharp(nn.Sequential(Residual(), Residual())), states())
    assert [step.kind for step in found.sublayers] == ["attention", "attention"]
    assert found.unavailable == []


def test_the_blocks_of_any_encoder_are_operators_on_its_tokens():
    model, batch = plain.gpt(sequential=True), ids()
    for block in model.blocks:
        block.attention.causal = False
    operators = massieu.population_layers(model, batch)
    with torch.no_grad():
        tokens = model.tokens(batch) + model.places.weight[:LENGTH]
        assert torch.allclose(operators(tokens), model.blocks(tokens), rtol=1e-5, atol=1e-4)


# --- the re-initialised control ------------------------------------------------------------------------------------------


def test_the_control_is_freshly_drawn_and_nothing_else_is():
    model = plain.gpt()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fresh, said = reinitialised(model, 3)
    again, _ = reinitialised(model, 3)
    assert said is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, value in fresh.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(value, again.state_dict()[name]), name
        if value.dim() > 1:
            assert not torch.isclose(value, before[name]).any(), name
    result = massieu.probe(model, massieu.Batches([ids()], window=LENGTH), statistics=["entropy"])
    assert "entropy/reinitialised" in set(result.heads["statistic"])


def test_a_weight_that_no_initialisation_reaches_leaves_the_control_out_by_name():
    result = massieu.probe(plain.gpt(table=False), massieu.Batches([ids()], window=LENGTH), statistics=["entropy"])
    (warning,) = result.run.warnings
    assert "control is left out" in warning
    assert "places" in warning
    assert "entropy/reinitialised" not in set(result.heads["statistic"])


def test_a_weight_that_feeds_no_attention_keeps_its_value_and_is_named():
    class Scaled(plain.Gpt):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, ids):
            return super().forward(ids) * self.temperature

    torch.manual_seed(0)
    result = massieu.probe(plain.sharp(Scaled()), massieu.Batches([ids()], window=LENGTH), statistics=["entropy"])
    (warning,) = result.run.warnings
    assert "control keeps" in warning.replace("it ", "")
    assert "temperature" in warning
    assert "entropy/reinitialised" in set(result.heads["statistic"])


def test_initialisations_of_a_models_own_are_applied():
    class Own(plain.Gpt):
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)

    torch.manual_seed(0)
    fresh, said = reinitialised(Own(), 0)
    assert said is None
    assert (fresh.blocks[0].attention.qkv.weight == 0.25).all()

    class Broken(plain.Gpt):
        def _init_weights(self, module):
            raise KeyError("no such layer")

    fresh, said = reinitialised(Broken(), 0)
    assert fresh is None
    assert "no such layer" in said

    class Watchful(plain.Gpt):
        def forward(self, ids):
            assert all(parameter.isfinite().all() for parameter in self.parameters()), "broken weights"
            return super().forward(ids)

    torch.manual_seed(0)
    result = massieu.probe(
        Watchful(table=False).eval(), massieu.Batches([ids()], window=LENGTH), statistics=["entropy"]
    )
    assert "control is left out" in result.run.warnings[0]
    assert "broken weights" in result.run.warnings[0]


# --- batches and results of every form -----------------------------------------------------------------------------------


@pytest.mark.medium
def test_batches_of_every_form_are_one():
    model, batch = plain.gpt(), ids()
    tables = [
        massieu.probe(model, massieu.Batches([given], window=LENGTH), statistics=["entropy"], draws=0).heads
        for given in (batch, (batch,), [batch], {"ids": batch})
    ]
    assert all(table.equals(tables[0]) for table in tables)

    class Loose(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *given):
            return [None, (self.inner(*given),)]

    found = massieu.probe(
        Loose(model).eval(), massieu.Batches([(batch,)], window=LENGTH), statistics=["entropy"], draws=0
    ).heads
    assert found["value"].equals(tables[0]["value"])


def test_names_of_arguments_and_what_a_result_holds():
    def forward(first, second=None, *rest, third=1):
        pass

    module = nn.Identity()
    module.forward = forward
    tensor = torch.ones(2)
    assert list(named_inputs(module, tensor)) == ["first"]
    assert list(named_inputs(module, (tensor, 3))) == ["first", "second"]
    assert list(named_inputs(module, (tensor, 3, tensor))) == ["*0", "*1", "*2"]
    assert list(named_inputs(module, {"third": 2, "first": tensor})) == ["third", "first"]

    @dataclasses.dataclass
    class Result:
        loss: int
        states: torch.Tensor

    whole = torch.ones(2, dtype=torch.long)
    for output in (tensor, (whole, tensor), {"a": None, "b": [tensor]}, Result(3, tensor)):
        assert output_tensor(module, output) is tensor
    with pytest.raises(InputError, match=r"Identity gave dict without a tensor of floating-point numbers"):
        output_tensor(module, {"a": whole})


def test_what_each_mask_calls_padding():
    ones = torch.tensor([[True, True, False]])
    cases = [
        ({"attention_mask": ones}, False, ones),
        ({"attention_mask": ones.long()}, False, ones),
        ({"attention_mask": ones.float()}, False, ones),
        ({"attention_mask": torch.where(ones, 0.0, -1e4)}, False, ones),
        ({"key_padding_mask": ~ones}, False, ones),
        ({"src_key_padding_mask": torch.where(ones, 0.0, -torch.inf)}, False, ones),
        ({"tgt_key_padding_mask": ~ones}, True, ones),
        ({"tgt_key_padding_mask": ~ones}, False, None),
        ({"decoder_attention_mask": ones}, True, ones),
        ({"attention_mask": ones[None]}, False, None),
        ({}, False, None),
    ]
    for inputs, decoder, expected in cases:
        found = real_mask(inputs, decoder=decoder)
        assert found is None if expected is None else torch.equal(found, expected), inputs


def test_bad_batches_are_one_sentence():
    model = plain.gpt()
    for batch, words in (
        (torch.ones(2, 3).numpy(), "a batch must be a tensor, a tuple of tensors or a mapping of names to tensors"),
        ({}, "got with no names"),
        ((), "got tuple"),
        ({"words": ids()}, r"the forward of Gpt does not take the batch with words of shape .*: missing .*'ids'"),
        ((ids(), ids()), r"the forward of Gpt does not take the batch tuple of Tensor, Tensor"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            massieu.probe(model, [batch], statistics=["entropy"])
        assert "\n" not in str(caught.value)
    for given in (ids(), {"ids": ids()}, 3):
        with pytest.raises(InputError, match="batches must be an iterable of batches"):
            massieu.probe(model, given)
    with pytest.raises(InputError, match="Gpt does not say what its inputs are; give data"):
        massieu.describe(model)


def test_a_type_error_inside_the_model_is_one_sentence_with_its_cause():
    class Picky(plain.Gpt):
        def forward(self, ids):
            return super().forward(ids + None)

    with pytest.raises(
        InputError, match=r"the forward of Picky does not take the batch with ids of shape .*: unsupported"
    ) as caught:
        massieu.probe(Picky().eval(), [ids()])
    assert isinstance(caught.value.__cause__, TypeError)


def test_training_mode_meta_lazy_and_random_modules_are_refused():
    model = plain.gpt()
    model.blocks[1].train()
    with pytest.raises(InputError, match=r"in training mode"):
        massieu.probe(model, [ids()])
    with pytest.raises(InputError, match="meta device or lazy"):
        massieu.probe(plain.gpt().to("meta"), [ids()])
    with pytest.raises(InputError, match="meta device or lazy"):
        massieu.probe(nn.Sequential(nn.LazyLinear(4)).eval(), [states()])
    with pytest.raises(InputError, match="Sequential has no attention to read"):
        massieu.probe(nn.Sequential(nn.Linear(16, 4)).eval(), [states()])

    class Noisy(plain.Gpt):
        def forward(self, ids):
            return super().forward(ids) + torch.rand(())

    with pytest.raises(InputError, match="output of Noisy is random"):
        massieu.probe(Noisy().eval(), [ids()])


def test_broken_numbers_are_named_and_the_rest_is_measured():
    model = plain.gpt()
    with torch.no_grad():
        model.blocks[1].attention.qkv.bias[0] = torch.nan  # of a query
    result = massieu.probe(model, massieu.Batches([ids()], window=LENGTH), statistics=["entropy"])
    assert "blocks.1.attention.qkv.bias" in result.run.trouble.sentence
    assert not result.run.self_check.passed
    assert numbers(result, "entropy", "blocks.0.attention").isfinite().all()
    assert sum(entry.count for entry in result.run.nonfinite) == ROWS * LENGTH


def test_what_a_module_is_afterwards_whatever_happened():
    model, batch = plain.gpt(), ids()
    with torch.no_grad():
        before = model(batch)

    def stop(state):
        raise KeyboardInterrupt

    for ending, kind in ((RuntimeError("in the model"), InputError), (KeyboardInterrupt(), KeyboardInterrupt)):
        handle = model.norm.register_forward_hook(lambda *_, ending=ending: (_ for _ in ()).throw(ending))
        with pytest.raises(kind):
            massieu.probe(model, [batch], statistics=["entropy"])
        handle.remove()
    with pytest.raises(KeyboardInterrupt):
        massieu.probe(model, [batch], statistics=["entropy"], run=massieu.Run(progress=stop))
    for module in model.modules():
        assert not module._forward_hooks, "no hook is left"
        assert not module._forward_pre_hooks, "no hook is left"
    assert torch.overrides._get_current_function_mode() is None
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(batch), before)
    with torch.inference_mode():
        inside = massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=["entropy"]).heads
    assert inside.equals(massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=["entropy"]).heads)


def test_half_precision_and_float64():
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.bfloat16, 5e-2)):
        model, batch = plain.gpt().to(dtype), ids()
        result = massieu.probe(model, massieu.Batches([batch], window=LENGTH), statistics=STATISTICS, draws=0)
        site = "blocks.0.attention"
        module, later = model.get_submodule(site), torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        given = attention_inputs(model, site, batch)
        expected = plain.attention(given, module.qkv.weight, module.qkv.bias, later)
        for name in STATISTICS:
            assert torch.allclose(numbers(result, name, site), expected[name].mean((0, 2)), atol=tolerance), name
        assert result.run.model.dtype == str(dtype).removeprefix("torch.")


def test_blocks_that_are_numbered_in_their_names_are_layers_of_one_stack():
    """As torchvision's `encoder_layer_0`, `encoder_layer_1`."""
    layers = {f"encoder_layer_{i}": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for i in range(2)}
    model = nn.Sequential(OrderedDict(layers)).eval()
    found = massieu.describe(model, {"input": torch.randn(2, 5, 8)})
    assert [site.layer for site in found.sites] == [0, 1]
