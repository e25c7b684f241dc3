"""`massieu.replace_attention`: the same model, with modules of ours in the place of PyTorch's attention."""

import copy
import functools

import pytest
import torch
from tests.support.rows import every_row, some_slow
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import massieu
from massieu.nn import Attention, EntmaxHeads, ImplicitHeads, MeasureHeads, SoftmaxHeads

OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 10},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "length first": {"batch_first": False},
}
LENGTHS = torch.tensor([5, 3, 1])
PADDING = torch.arange(5) >= LENGTHS.unsqueeze(1)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested.tensor.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*mismatched src_key_padding_mask.*:UserWarning"),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **{"batch_first": True, "dtype": torch.float64, **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def stack(layers: int = 2, **options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **options}
    built = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **options), layers)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.5)
    return built


def results(module: nn.Module, *inputs: Tensor, **options) -> list[Tensor]:
    """What a call returns, and the gradients of inputs and parameters."""
    inputs = tuple(each.clone().requires_grad_() for each in inputs)
    found = module(*inputs, **options)
    outputs = [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]
    return outputs + list(torch.autograd.grad(outputs[0].square().sum(), [*inputs, *module.parameters()]))


def compare(theirs: nn.Module, ours: nn.Module, *inputs: Tensor, **options) -> None:
    wanted, found = (results(module, *inputs, **options) for module in (theirs, ours))
    assert len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


@every_row("options", OPTIONS.values(), ids=OPTIONS)
@every_row("training", [True, False])
def test_the_module_itself_is_replaced_by_one_that_is_returned(options, training):
    old = attention(**options).train(training)
    old.out_proj.bias = None if old.out_proj.bias is None else old.out_proj.bias.requires_grad_(False)
    before, twin = list(old.named_parameters()), copy.deepcopy(old)
    for parameter in twin.parameters():
        parameter.requires_grad_()
    new = massieu.replace_attention(old)
    assert type(new) is Attention
    assert [(name, id(one)) for name, one in new.named_parameters()] == [(name, id(one)) for name, one in before]
    assert new.training is new.heads.training is training
    assert new.out_proj.bias is None or not new.out_proj.bias.requires_grad
    for parameter in new.parameters():
        parameter.requires_grad_()
    inputs = draw(3, 5, 8), draw(3, 5, old.kdim, seed=1), draw(3, 5, old.vdim, seed=2)
    compare(twin, new, *inputs)
    compare(twin, new, *inputs, need_weights=False)


@pytest.mark.medium
@some_slow(
    ("options", "first", "training"),
    [
        ({"bias": False}, True, True),
        ({"bias": False}, False, False),
        ({}, True, False),
        ({"activation": "gelu", "norm_first": True}, True, False),
    ],
    2,
)
def test_a_built_encoder_is_what_it_was_with_its_masks(options, first, training):
    theirs = stack(batch_first=first, **options).train(training)
    ours, twin = massieu.replace_attention(copy.deepcopy(theirs)), theirs
    assert {type(layer.self_attn) for layer in ours.layers} == {Attention}  # pyright: ignore[reportGeneralTypeIssues]
    tokens = draw(3, 5, 8) if first else draw(5, 3, 8)
    for masks in ({}, {"mask": CAUSAL}, {"mask": CAUSAL, "is_causal": True}):
        compare(twin, ours, tokens, **masks)
    for masks in ({"src_key_padding_mask": PADDING}, {"mask": CAUSAL, "src_key_padding_mask": PADDING}):
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with context():
                wanted, found = (module(tokens, **masks) for module in (theirs, ours))
            if not first:
                wanted, found = wanted.transpose(0, 1), found.transpose(0, 1)
            torch.testing.assert_close(found[~PADDING], wanted[~PADDING], rtol=1e-9, atol=1e-10)


@every_row("training", [True, False])
def test_decoders_and_whole_transformers(training):
    torch.manual_seed(0)
    theirs = nn.Transformer(8, 2, 1, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    ours = massieu.replace_attention(copy.deepcopy(theirs))
    assert sum(isinstance(part, Attention) for part in ours.modules()) == 5
    options = {"tgt_mask": CAUSAL, "src_key_padding_mask": PADDING, "memory_key_padding_mask": PADDING}
    compare(theirs, ours, draw(3, 5, 8), draw(3, 5, 8, seed=1), tgt_is_causal=True, **options)


def test_no_fast_path_goes_past_the_new_module():
    ours, calls = massieu.replace_attention(stack()).eval(), []
    for layer in ours.layers:  # pyright: ignore[reportGeneralTypeIssues]
        layer.self_attn.heads.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        ours(draw(3, 5, 8))
        ours(draw(3, 5, 8), src_key_padding_mask=PADDING)
    assert len(calls) == 4


def test_state_dicts_load_both_ways():
    theirs, ours = stack(), massieu.replace_attention(stack())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    renewed = {name: tensor + 1 for name, tensor in theirs.state_dict().items()}
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(renewed)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in renewed.items())


def test_an_optimiser_made_before_trains_the_new_module():
    theirs, model = stack(), stack()
    optimisers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (theirs, model)]
    massieu.replace_attention(model)
    for _ in range(2):
        for each, optimiser in zip((theirs, model), optimisers, strict=True):
            each(draw(3, 5, 8)).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()
    for wanted, found in zip(theirs.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_a_shared_module_stays_one_and_nothing_is_drawn():
    shared = attention()
    model, state = nn.ModuleDict({"one": shared, "list": nn.ModuleList([shared, attention()])}), torch.get_rng_state()
    massieu.replace_attention(model)
    assert model["one"] is model["list"][0] is not model["list"][1]
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_and_attributes_come_along():
    old, called = attention(), []
    handle = old.register_forward_hook(lambda module, given, output: called.append(type(module)))
    old.register_forward_pre_hook(lambda module, given, options: called.append(len(given)), with_kwargs=True)
    old.register_full_backward_hook(lambda *_: called.append("backward"))
    old.label = "first"
    new = massieu.replace_attention(old)
    tokens = draw(3, 5, 8).requires_grad_()
    new(tokens, tokens, tokens)[0].sum().backward()
    assert called == [3, Attention, "backward"]
    assert new.label == "first"
    handle.remove()
    new(tokens, tokens, tokens)
    assert called == [3, Attention, "backward", 3]


def test_another_strategy_for_each_module():
    model = massieu.replace_attention(stack(), heads=lambda old: EntmaxHeads(alpha=torch.full((old.num_heads,), 1.5)))
    alphas = [layer.self_attn.heads.alpha for layer in model.layers]  # pyright: ignore[reportGeneralTypeIssues]
    assert [(alpha.dtype, alpha.shape) for alpha in alphas] == [(torch.float64, (2,))] * 2
    assert torch.isfinite(model(draw(3, 5, 8))).all()


def test_half_precision_and_meta():
    half = stack().bfloat16()
    assert massieu.replace_attention(half).layers[0].self_attn(draw(3, 5, 8).bfloat16())[0].dtype == torch.bfloat16
    empty = massieu.replace_attention(attention(device="meta"))
    assert empty(draw(3, 5, 8).to("meta"))[0].shape == (3, 5, 8)


class Own(nn.MultiheadAttention):
    """A subclass, as users write."""


def pruned(module: nn.MultiheadAttention) -> None:
    prune.l1_unstructured(module, "in_proj_weight", 0.5)


def spoiled_forward(module: nn.MultiheadAttention) -> None:
    module.forward = functools.partial(type(module).forward, module)


SPOILED = {
    "Parametrized": lambda module: parametrizations.weight_norm(module, "in_proj_weight"),
    "ParametrizedNonDynamically": lambda module: parametrizations.spectral_norm(module.out_proj, "weight"),
    "in_proj_weight_orig": pruned,
    "out_proj.weight_orig": lambda module: prune.l1_unstructured(module.out_proj, "weight", 0.5),
    "forward was changed": spoiled_forward,
    "compiled": lambda module: setattr(module, "_compiled_call_impl", module._call_impl),
    "Sequential": lambda module: setattr(module, "out_proj", nn.Sequential(module.out_proj)),
    "bound": lambda module: module.register_load_state_dict_pre_hook(lambda *_: None),
    "more": lambda module: module.register_buffer("more", torch.zeros(1)),
}


@every_row("name", SPOILED)
def test_what_cannot_be_replaced_is_named_and_nothing_is_changed(name):
    model = nn.Sequential(attention(), nn.Sequential(attention()))
    SPOILED[name](model[1][0])
    before = list(model.modules())
    with pytest.raises(ValueError, match=rf"^1\.0 .*{name}"):
        massieu.replace_attention(model)
    assert list(model.modules()) == before


def test_subclasses_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^0 \(Own\) .*test_replace.Own, not torch.nn.MultiheadAttention"):
        massieu.replace_attention(nn.Sequential(Own(8, 2)))


def test_bad_calls():
    model = nn.Sequential(attention(dropout=0.1))
    calls = [
        (("model",), {}, TypeError, "model must be a torch.nn.Module, got 'model'"),
        ((nn.Linear(2, 2),), {}, ValueError, "Linear has no torch.nn.MultiheadAttention to replace"),
        ((model,), {"heads": SoftmaxHeads()}, TypeError, "heads must be a function .* SoftmaxHeads"),
        ((model,), {"heads": 3}, TypeError, "heads must be a function from the old module to a strategy, got 3"),
        ((model,), {"heads": lambda old: 3}, TypeError, "what heads returns for 0 must be a strategy"),
        ((model,), {"heads": lambda old: ImplicitHeads()}, ValueError, "cannot take the weights of 0"),
        ((model,), {"heads": lambda old: MeasureHeads(lambda *_: None)}, ValueError, "0 cannot be .* dropout"),
    ]
    for arguments, options, kind, words in calls:
        with pytest.raises(kind, match=words):
            massieu.replace_attention(*arguments, **options)
    assert type(model[0]) is nn.MultiheadAttention


def test_a_strategy_already_bound_is_refused():
    strategy, model = SoftmaxHeads(), nn.Sequential(attention(), attention())
    with pytest.raises(
        ValueError, match=r"1 cannot be replaced: .*this SoftmaxHeads is already bound to another module"
    ):
        massieu.replace_attention(model, heads=lambda old: strategy)
    assert type(model[0]) is nn.MultiheadAttention


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)


@pytest.mark.medium
@every_row("targets", [["attention"], ["out_proj"]])
def test_adapters_are_refused_by_name(targets):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(Around(), peft.LoraConfig(target_modules=targets))
    before = [type(part) for part in adapted.modules()]
    with pytest.raises(ValueError, match=r"base_model.model.attention .*(an adapter of peft|peft.tuners)"):
        massieu.replace_attention(adapted)
    assert [type(part) for part in adapted.modules()] == before
