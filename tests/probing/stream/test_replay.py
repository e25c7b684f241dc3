"""Maps read off an attention module are the module's own weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.probing import eager, zoo
from tests.support.rows import every_row
from torch import Tensor, nn

from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import find_sites, first_pass
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.stream.own_weights import maps_among_weights, replaced_output
from massieu.probing.stream.replay import Replay, affine_projections
from massieu.probing.stream.wiring import AttentionRead, StreamTracer


def first_read(model: nn.Module, batch: dict[str, Tensor]) -> AttentionRead:
    """What the first attention layer of a model read in a pass."""
    prepared = model_inputs(model, batch)
    steps = []
    tracer = StreamTracer(model, find_sites(model, first_pass(model, prepared)), steps.append)
    with torch.no_grad(), capturing(model, tracer.attention), tracer.watching():
        model(**prepared)
    return next(step.read for step in steps if step.read is not None)


def test_affine_maps_are_the_weights_and_biases_of_the_module():
    model = zoo.fresh("bert")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    read = first_read(model, zoo.inputs("bert"))
    assert read.residual is not None
    with torch.no_grad(), capturing(model, lambda call: None) as capture:
        maps = affine_projections(capture, read)
        replay = Replay(capture, read)
        query_map = replay.query_map(torch.arange(5))
        moved = read.residual[:, :5] + torch.randn(read.call.query.shape[1], 1, 5, read.residual.shape[-1])
        each = [r.own_queries(moved, torch.arange(5)) for r in (replay, replace(replay, affine=query_map))]
    torch.testing.assert_close(*each)
    module: Any = read.call.module
    heads = read.call.query.shape[1]
    for (weight, bias), linear in zip(maps, (module.query, module.key, module.value), strict=True):
        torch.testing.assert_close(weight.flatten(0, 1).float(), linear.weight.detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(bias.flatten().float(), linear.bias.detach(), atol=1e-5, rtol=1e-4)
    assert query_map is not None
    torch.testing.assert_close(query_map[0], maps[0][0].float(), atol=1e-5, rtol=1e-4)
    assert query_map[1].shape == (heads, module.query.out_features // heads)


@every_row("name", ["bert", "gpt2", "llama"])
def test_maps_among_the_weights_are_those_that_basis_vectors_read_off(name):
    """Separate and fused projections, grouped keys: of one token, where rotary embeddings do nothing."""
    model: Any = zoo.fresh(name).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    read = first_read(model, zoo.inputs(name, rows=1))
    with torch.no_grad(), capturing(model, lambda call: None) as capture:
        replay = Replay(capture, read)
        stored, basis = replay.stored_maps(), replay.read_off(None)
    assert stored is not None
    owned = {parameter.untyped_storage().data_ptr() for parameter in read.call.module.parameters()}
    for (weight, bias), results in zip(stored, basis, strict=True):
        assert weight.untyped_storage().data_ptr() in owned, "a map takes no memory of its own"
        torch.testing.assert_close(bias, results[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(weight, (results[1:] - results[0]).permute(1, 2, 0), rtol=1e-9, atol=1e-9)


_WITH_ALIBI: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40},
    "Falcon": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40, "alibi": True,
               "multi_query": False, "new_decoder_architecture": False, "parallel_attn": False, "bias": True},
}  # fmt: skip


@pytest.mark.medium
@every_row("architecture, padded", [(name, padded) for name in _WITH_ALIBI for padded in (False, True)])
def test_a_bias_by_position_of_items_and_heads_in_one_dimension_is_replayed(architecture, padded):
    """Queries at moved states are those of the fused weight (head by head query, key, value), for the batch and each item."""
    attention = "sdpa" if architecture == "Falcon" else "eager"
    model: Any = eager.create(architecture, _WITH_ALIBI[architecture], attention).double()
    mask = (torch.arange(9) >= torch.tensor([0, 4, 2])[:, None]).long()
    ids = torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    read = first_read(model, {"input_ids": ids, **({"attention_mask": mask} if padded else {})})
    block, positions = model.h[0], torch.tensor([5, 6, 8])
    fused = block.self_attention.query_key_value
    weight, bias = fused.weight.unflatten(0, (4, 3, 4))[:, 0], fused.bias.unflatten(0, (4, 3, 4))[:, 0]
    with torch.no_grad(), capturing(model, lambda call: None) as capture:
        for part in (read, *(read.item(row) for row in range(3))):
            assert part.residual is not None
            moved = part.residual[:, positions] + torch.randn(4, 1, 3, 16).double()
            states = block.input_layernorm(moved)
            right = torch.einsum("hbsd,hkd->bhsk", states, weight) + bias[:, None]
            for whole in (False, True):
                replay = Replay(capture, part, whole=whole)
                assert replay.why_not(positions) is None
                torch.testing.assert_close(replay.own_queries(moved, positions), right)
            assert affine_projections(capture, part) is not None


def test_a_weight_that_is_nearly_the_map_is_not_taken_for_it():
    layer = nn.Linear(6, 4)
    state = torch.linspace(-1, 1, 6)
    result = layer(state).detach().view(2, 2)
    maps = maps_among_weights(layer, state, [result])
    assert maps is not None
    assert torch.equal(maps[0][0].flatten(0, 1), layer.weight)
    assert torch.equal(maps[0][1].flatten(), layer.bias)
    assert maps_among_weights(layer, state, [result * (1 + 1e-4)]) is None
    assert maps_among_weights(layer, state, [result, -result]) is None
    assert maps_among_weights(layer.bfloat16(), state.bfloat16(), [result.bfloat16()]) is None
    assert maps_among_weights(layer, state, [result]) is None, "weights of another precision"


@every_row("name", ["llama", "gemma2"])
def test_one_call_serves_all_heads_where_a_linear_layer_begins_the_query(name):
    """Queries and derivatives equal those of the whole module, one head after the other."""
    model: Any = zoo.fresh(name).double()
    for layer in model.layers:
        layer.self_attn.q_proj.bias = nn.Parameter(torch.randn(layer.self_attn.q_proj.out_features).double())
    read = first_read(model, zoo.inputs(name, rows=1))
    assert read.residual is not None
    positions = torch.arange(1, 20, 2)
    with torch.no_grad(), capturing(model, lambda call: None) as capture:
        alone = Replay(capture, read)
        together = alone.in_two_parts(positions)
        assert together.linear is read.call.module.q_proj
        residual = read.residual[:, positions]
        heads = read.call.query.shape[1]
        moved = residual + torch.randn(heads, *residual.shape, dtype=torch.float64)
        slopes = [torch.randn_like(read.call.query[:, :, positions]) for _ in range(2)]
        queries = together.own_queries(moved, positions)
        for head in range(heads):
            torch.testing.assert_close(queries[:, head], alone.queries(moved[head], positions)[:, head])
        gradients = zip(together.pulled_back(slopes, positions), alone.pulled_back(slopes, positions), strict=True)
        for mine, expected in gradients:
            torch.testing.assert_close(mine, expected)
    assert not read.call.module.q_proj._forward_hooks


def test_heads_that_the_module_mixes_are_replayed_one_by_one():
    """A query norm over all heads, and a layer beside the projection that the query also comes of."""
    batch = zoo.inputs("llama", rows=1)

    def normalised(module: nn.Module, inputs: object, query: Tensor) -> Tensor:
        return query / query.square().mean(-1, keepdim=True).sqrt()

    def adapted(module: nn.Module, inputs: tuple[Tensor], query: Tensor) -> Tensor:
        return query + 0.01 * inputs[0].flip(-1)[..., : query.shape[-1]]

    for changed in (normalised, adapted):
        model: Any = zoo.fresh("llama")
        for layer in model.layers:
            layer.self_attn.q_proj.register_forward_hook(changed)
        read = first_read(model, batch)
        with torch.no_grad(), capturing(model, lambda call: None) as capture:
            replay = Replay(capture, read).in_two_parts(torch.arange(20))
        assert replay.linear is None
        assert replay.affine is None


def test_a_layers_output_is_replaced_inside_alone_and_in_its_shape():
    layer, state = nn.Linear(3, 2), torch.ones(1, 3)
    with replaced_output(layer, torch.zeros(1, 2)):
        assert not layer(state).any()
    assert layer(state).any()
    with pytest.raises(ValueError, match=r"the output has shape \(1, 2\), not \(1, 3\)"), replaced_output(layer, state):
        layer(state)
    assert layer(state).shape == (1, 2)
