"""Models drawn block by block: their law is the constructor's, and whoever asks for a weight gets the same one."""

import copy
import hashlib
import itertools
import re
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from tests.support.probing import constructors, zoo
from tests.support.probing.drawn import in_memory
from tests.support.rows import some_slow
from torch import Tensor, nn

from massieu.probing.model import drawn as drawn_models
from massieu.probing.model.blueprint import blueprint_of, smaller
from massieu.probing.model.drawn import Blueprint, DrawnWeights
from massieu.probing.model.forward import output_tensor
from massieu.probing.model.fresh import reinitialised
from massieu.probing.model.recorded import ROWS, UnrecordedError, recording
from massieu.probing.model.seeding import OwnGenerator, seed_of

CASES: dict[str, Any] = {
    name: lambda name=name: ((made := constructors.model(name)), constructors.inputs(made))
    for name in constructors.NAMES
}
CASES |= {name: lambda name=name: (zoo.model(name), zoo.inputs(name)) for name in sorted(zoo.REQUIRED)}
FAST = len(constructors.NAMES) + 1
every_model = some_slow("name", CASES, FAST)


def blueprint(model: nn.Module) -> Blueprint:
    found = blueprint_of(model)
    assert isinstance(found, Blueprint), found
    return found


def blocks_of(model: nn.Module) -> set[str]:
    """Items of module lists, which is where blocks are."""
    return {name for name, _ in model.named_modules() if name.split(".")[-1].isdigit()}


def draw(model: Any, seed: int = 1, blocks: set[str] | None = None) -> tuple[Any, DrawnWeights]:
    names = blocks_of(model) if blocks is None else blocks
    return blueprint(model).draw(names, seed, torch.device("cpu"), torch.float32)


@pytest.mark.medium
@every_model
def test_a_record_makes_bit_for_bit_what_the_constructor_makes(name):
    """The constructor's own numbers, with one generator for all, are the oracle."""
    model, _ = CASES[name]()
    with OwnGenerator(5):
        expected = type(model)(copy.deepcopy(model.config))
    with recording() as record:
        tree = type(model)(copy.deepcopy(model.config))
    assert all(each.is_meta for each in tree.parameters())
    numbers = record.all_numbers(torch.Generator().manual_seed(5))
    own = dict(itertools.chain(expected.named_parameters(), expected.named_buffers()))
    made = dict(itertools.chain(tree.named_parameters(), tree.named_buffers()))
    assert own.keys() == made.keys()
    for each, tensor in own.items():
        torch.testing.assert_close(numbers(made[each]).detach(), tensor.detach(), rtol=0, atol=0, msg=each)


@pytest.mark.medium
@every_model
def test_a_pass_block_by_block_is_one_with_all_weights_in_memory(name):
    """Modules called twice, weights that another module reads, tied tables: each is one draw for the whole pass."""
    model, batch = CASES[name]()
    drawn, _ = draw(model)
    with torch.no_grad():
        found = output_tensor(drawn, drawn(**batch))
        expected = output_tensor(model, in_memory(model, drawn)(**batch))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": 8000} | changes
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None)).eval()


def alive(drawn: DrawnWeights) -> set[str]:
    return {*drawn._of_block, *drawn._outside}


def test_one_block_at_a_time_has_weights():
    model = gpt2()
    fresh, weights = draw(model, blocks={"transformer.h.0", "transformer.h.1", "transformer.h.2"})
    assert alive(weights) == set()
    with torch.no_grad():
        fresh(input_ids=torch.arange(8)[None])
    outside = {"transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}
    block = {f"transformer.h.2.{name}" for name, _ in model.transformer.h[2].named_parameters()}
    assert alive(weights) == outside | block
    weights.forget()
    assert alive(weights) == set()


def test_a_weight_that_somebody_holds_keeps_its_numbers():
    fresh, _ = draw(gpt2())
    first, second = fresh.transformer.h[0].attn.c_attn, fresh.transformer.h[1].attn.c_attn
    held = first.weight
    numbers = held.detach().clone()
    assert second.weight is not held and not torch.equal(second.weight, numbers)
    assert torch.equal(held, numbers) and torch.equal(first.weight, numbers)


def test_to_list_the_parameters_draws_none():
    model = gpt2()
    fresh, weights = draw(model)
    listed = dict(fresh.named_parameters())
    assert {name: each.shape for name, each in listed.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert alive(weights) == set() and all(bool(each.isnan().all()) for each in list(listed.values())[1:])


def test_draws_depend_on_seed_and_name_alone():
    """Not on what was asked for before, nor on how many layers and tokens there are."""
    one, other, deeper = draw(gpt2())[0], draw(gpt2())[0], draw(gpt2(n_layer=5))[0]
    for place in (2, 0, 1):
        again = other.transformer.h[place].mlp.c_fc.weight.clone()
        assert torch.equal(one.transformer.h[place].mlp.c_fc.weight, again)
        assert torch.equal(deeper.transformer.h[place].mlp.c_fc.weight, again)
    next_seed = draw(gpt2(), seed=2)[0]
    assert not torch.equal(next_seed.transformer.h[0].mlp.c_fc.weight, one.transformer.h[0].mlp.c_fc.weight)


def test_seeds_are_the_same_in_every_process():
    digest = hashlib.blake2b(b"0/h.0.attn.weight/1", digest_size=8).digest()
    assert seed_of(0, "h.0.attn.weight", 1) == int.from_bytes(digest, "big") // 2


# Tables -----------------------------------------------------------------------------------------------------------------


def test_rows_of_a_table_are_the_same_whichever_are_used():
    """A table larger than a block is never whole in memory; the head that it is tied to reads it in parts."""
    model = gpt2()
    fresh, weights = draw(model)
    with torch._C.DisableTorchFunction():
        table = draw(model)[0].transformer.wte.weight.detach()
    few, many = torch.tensor([[7999, 3, 3, 16]]), torch.arange(500, 1500)[None]
    with torch.no_grad():
        for numbers in (few, many, few):
            torch.testing.assert_close(fresh.transformer.wte(numbers), table[numbers], rtol=0, atol=0)
        state = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(fresh.lm_head(state), state @ table.mT, rtol=1e-5, atol=1e-6)
    assert fresh.lm_head.weight is fresh.transformer.wte.weight
    assert alive(weights) == set()
    assert fresh.transformer.wte.weight.shape == (8000, 16) and fresh.lm_head.weight.device.type == "cpu"
    assert alive(weights) == set()


def test_a_table_has_the_law_of_the_constructor():
    """Mean and deviation of rows by rows, and the row of padding is zero: N(0, .02²), whose moments are known."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=8000,
        pad_token_id=3,
    )
    fresh, _ = draw(BertModel(config))
    with torch.no_grad():
        rows = fresh.embeddings.word_embeddings(torch.arange(8000)).double()
    assert bool((rows[3] == 0).all())
    rest = torch.cat([rows[:3], rows[4:]]).flatten() / 0.02
    assert abs(float(rest.mean())) < 5 / len(rest) ** 0.5
    assert abs(float(rest.var()) - 1) < 5 * (2 / len(rest)) ** 0.5
    groups = rows[ROWS:].reshape(-1, ROWS, 16)
    assert len(groups.flatten(1).unique(dim=0)) == len(groups)


def test_gradients_reach_the_rows_that_are_looked_up():
    fresh, _ = draw(gpt2())
    ids = torch.tensor([[5, 9]])
    state = fresh.transformer.wte(ids)
    assert state.requires_grad
    loss = output_tensor(fresh, fresh(input_ids=ids)).square().mean()
    grown = torch.autograd.grad(loss, [fresh.transformer.h[2].mlp.c_fc.weight], allow_unused=True)
    assert all(grad is None or bool(grad.isfinite().all()) for grad in grown)


# Values that constructors make ---------------------------------------------------------------------------------------------


def test_learned_statistics_of_batch_norms_are_reset():
    model = constructors.model("batch norm")
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d)]
    for each in norms:
        each.get_buffer("running_mean").fill_(3.0)
        each.get_buffer("running_var").fill_(7.0)
    fresh, _ = draw(model)
    made = [each for each in fresh.modules() if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(made) == len(norms) > 0
    for each in made:
        assert bool((each.get_buffer("running_mean") == 0).all()) and bool((each.get_buffer("running_var") == 1).all())


def test_types_and_buffers_are_those_that_a_whole_model_is_moved_to():
    model: Any = zoo.fresh("llama").to(torch.bfloat16)
    fresh: Any
    fresh, _ = blueprint(model).draw(blocks_of(model), 1, torch.device("cpu"), torch.bfloat16)
    assert fresh.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    expected = type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(fresh.get_buffer(name), buffer, rtol=0, atol=0)


def test_a_quantised_model_is_drawn_from_its_configuration_in_plain_numbers():
    model: Any = zoo.fresh("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    fresh, _ = draw(model)
    assert type(fresh.layers[0].mlp.up_proj) is nn.Linear
    assert fresh.layers[0].mlp.up_proj.weight.dtype == torch.float32


# The law -------------------------------------------------------------------------------------------------------------------


def minilm() -> Any:
    """The shape of all-MiniLM-L6-v2 with two layers and few tokens."""
    return zoo.fresh(
        "bert", hidden_size=384, num_hidden_layers=2, num_attention_heads=12, intermediate_size=1536
    ).eval()


def shown(model: Any, batch: dict[str, Tensor]) -> list[float]:
    """What a model with random weights shows: mean entropy and largest weight of each layer's heads, size of the output."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    attentions = getattr(output, "attentions", None) or (*output.encoder_attentions, *output.decoder_attentions)
    numbers = [torch.special.entr(each).sum(-1).mean() for each in attentions]
    numbers += [each.amax(-1).mean() for each in attentions]
    return [float(each) for each in (*numbers, output_tensor(model, output).std(correction=0))]


def least_p(one: list[list[float]], other: list[list[float]]) -> float:
    """The least p-value of two-sample Kolmogorov–Smirnov tests of each number, times the number of tests."""
    results: list[Any] = [
        scipy.stats.ks_2samp(*pair) for pair in zip(np.transpose(one), np.transpose(other), strict=True)
    ]
    return min(result.pvalue for result in results) * len(results)


DRAWS = 40


def whole(model: Any, seed: int) -> Any:
    made, _ = reinitialised(model, seed)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "t5", "llama", "MiniLM"])
def test_draws_have_the_law_of_whole_models(name):
    """At 1 in 10,000 for each model; heads that are drawn 1.5 times as wide are noticed."""
    model = minilm() if name == "MiniLM" else zoo.fresh(name)
    batch = zoo.inputs("bert" if name == "MiniLM" else name)
    blueprint = blueprint_of(model)
    assert isinstance(blueprint, Blueprint)
    place = blocks_of(model), torch.device("cpu"), torch.float32
    drawn = [shown(blueprint.draw(place[0], seed, *place[1:])[0], batch) for seed in range(DRAWS)]
    built = [shown(whole(model, seed), batch) for seed in range(DRAWS)]
    assert least_p(drawn, built) > 1e-4
    for each in ("initializer_range", "initializer_factor"):
        if hasattr(model.config, each):
            setattr(model.config, each, 1.5 * getattr(model.config, each))
    wider = [shown(whole(model, seed), batch) for seed in range(DRAWS)]
    assert least_p(drawn, wider) < 1e-4


# Models that are built whole -------------------------------------------------------------------------------------------------


def config_of(**changes: Any) -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig(**{"hidden_size": 4, **changes})


def odd(make: Any) -> Any:
    """A model of transformers with one parameter, made in an odd way."""
    from transformers import PreTrainedModel

    class Odd(PreTrainedModel):
        config_class = type(config_of())

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.kept = make()
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            pass

    return Odd(config_of())


def of_numpy() -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.random.default_rng().normal(size=3)))


def of_its_own_draws() -> nn.Parameter:
    numbers = torch.randn(4)
    return nn.Parameter(numbers if float(numbers[0]) > 0 else -numbers)


def of_exchanged_memory() -> nn.Parameter:
    return nn.Parameter(torch.ones(3).set_(torch.randn(3).untyped_storage()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_numpy, r"kept of Odd is not what the record of its constructor makes"),
        (of_its_own_draws, r"asks for numbers that .* has drawn"),
        (of_exchanged_memory, r"exchanges the memory of a tensor"),
    ],
    ids=["another library's random numbers", "a choice by what was drawn", "exchanged memory"],
)
def test_what_a_record_cannot_hold_is_said(make, reason):
    found = blueprint_of(odd(make))
    assert isinstance(found, str) and re.search(reason, found)


def test_a_record_is_made_once_for_a_model_and_its_configuration():
    model = zoo.fresh("gpt2")
    first = blueprint(model)
    assert blueprint(model) is first
    model.config.initializer_range *= 2
    second = blueprint(model)
    assert second is not first
    weight, wider_weight = (
        made.draw(blocks_of(model), 1, torch.device("cpu"), torch.float32)[0].h[0].mlp.c_fc.weight
        for made in (first, second)
    )
    torch.testing.assert_close(wider_weight, 2 * weight)


def test_no_two_modules_of_a_draw_share_hooks():
    fresh, _ = draw(zoo.fresh("gpt2"))
    hooks = [value for module in fresh.modules() for value in vars(module).values() if isinstance(value, OrderedDict)]
    assert len({id(each) for each in hooks}) == len(hooks)


def test_a_module_without_a_configuration_is_said():
    assert blueprint_of(nn.Linear(2, 2)) == "Linear has no configuration from which it could be built"


def test_other_threads_draw_and_build_as_ever_while_a_model_is_recorded():
    made: list[Tensor] = []

    def elsewhere() -> None:
        made.append(nn.init.trunc_normal_(torch.empty(50)))

    state = torch.get_rng_state()
    with recording():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert nn.init.trunc_normal_(torch.empty(4)).is_meta
    assert made[0].device.type == "cpu" and bool(made[0].abs().max() <= 2) and float(made[0].std()) > 0.1
    assert nn.init.trunc_normal_(torch.empty(4)).device.type == "cpu"
    torch.set_rng_state(state)


def test_a_tensor_of_elsewhere_is_not_changed_unseen():
    outside = torch.zeros(3)
    with pytest.raises(UnrecordedError, match="changes a tensor that has numbers already"), recording():
        outside.add_(torch.randn(3))


def test_a_smaller_configuration_has_few_layers_and_tokens():
    from transformers import Gemma2Config, SwinConfig

    small = smaller(Gemma2Config(num_hidden_layers=26, vocab_size=256000, hidden_size=2304), 8)
    assert (small.num_hidden_layers, len(small.layer_types), small.vocab_size, small.hidden_size) == (2, 2, 1000, 288)
    assert smaller(SwinConfig(depths=[2, 2, 18, 2])).depths == [2, 2, 2, 2]
    assert Gemma2Config().num_hidden_layers == 26


@pytest.mark.medium
@every_model
def test_what_is_drawn_element_by_element_is_the_same_in_memory_of_a_devices_own(name, monkeypatch):
    """A GPU draws other numbers by the same operations; the processor draws the same ones."""
    model, _ = CASES[name]()
    found = blueprint_of(model)
    if isinstance(found, str):
        pytest.skip(found)
    _, expected = found.draw(blocks_of(model), 3, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(drawn_models, "DRAWING_DEVICES", frozenset({"cpu"}))
    _, weights = found.draw(blocks_of(model), 3, torch.device("cpu"), torch.float32)
    all_weights = [weight for _, weight in found._weights(blocks_of(model))]
    assert any(weight.by_element and weight.table is None for weight in all_weights)
    for weight in all_weights:
        assert torch.equal(weights.of(weight), expected.of(weight)), weight.name
