"""Modules in a built `torch.nn.TransformerEncoder`, which makes nested tensors of padded ones in evaluation."""

import pytest
import torch
from tests.support.rows import every_row, one_in
from torch import Tensor, nn

from massieu.nn import Attention, ConditionalMeanHeads, EntmaxHeads, ImplicitHeads, NormalizedHeads, SoftmaxHeads

STRATEGIES = {
    strategy.__name__: strategy
    for strategy in (SoftmaxHeads, EntmaxHeads, NormalizedHeads, ConditionalMeanHeads, ImplicitHeads)
}
LENGTHS = torch.tensor([5, 3, 1])
PADDING = torch.arange(5) >= LENGTHS.unsqueeze(1)

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoder(strategy: type[nn.Module], replaced: tuple[int, ...] = (0, 1), **options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    built = nn.TransformerEncoder(layer, 2)
    for place in replaced:
        built.layers[place].self_attn = Attention(8, 2, batch_first=True, heads=strategy(), **options)
    return built


@every_row(
    ("name", "replaced"), [*((name, (0, 1)) for name in STRATEGIES), ("EntmaxHeads", (1,)), ("SoftmaxHeads", (0,))]
)
def test_a_built_encoder_in_evaluation_is_what_it_is_in_training(name: str, replaced: tuple[int, ...]):
    built, tokens = encoder(STRATEGIES[name], replaced), draw(3, 5, 8)
    wanted = built.train()(tokens, src_key_padding_mask=PADDING)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            found = built.eval()(tokens, src_key_padding_mask=PADDING)
        torch.testing.assert_close(found[~PADDING], wanted[~PADDING], rtol=1e-4, atol=1e-5)


def test_more_keys_and_half_precision():
    for options, dtype in (({"add_zero_attn": True}, torch.float32), ({"add_bias_kv": True}, torch.bfloat16)):
        built, tokens = encoder(SoftmaxHeads, **options).to(dtype), draw(3, 5, 8).to(dtype)
        wanted = built.train()(tokens, src_key_padding_mask=PADDING)
        with torch.no_grad():
            found = built.eval()(tokens, src_key_padding_mask=PADDING)
        close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(found[~PADDING], wanted[~PADDING], **close)


@one_in(2, {"layout": [torch.strided, torch.jagged], "name": STRATEGIES})
def test_nested_tensors_of_either_layout(name: str, layout: torch.layout):
    """Each sequence is what it is alone, and gradients reach it."""
    torch.manual_seed(0)
    module = Attention(8, 2, batch_first=True, heads=STRATEGIES[name]())
    sequences = [draw(length, 8, seed=length).requires_grad_() for length in LENGTHS.tolist()]
    nested = torch.nested.as_nested_tensor(sequences, layout=layout)
    found, weights = module(nested, nested, nested)
    assert found.is_nested
    assert found.layout == layout
    added = (nested + found).unbind()
    for place, (sequence, row) in enumerate(zip(sequences, found.unbind(), strict=True)):
        alone, own = module(sequence, sequence, sequence)
        torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(added[place], sequence + alone, rtol=1e-4, atol=1e-6)
        length = len(sequence)
        if name != "ImplicitHeads":
            torch.testing.assert_close(weights[place, :length, :length], own, rtol=1e-4, atol=1e-6)
    sum(row.square().sum() for row in found.unbind()).backward()
    assert all(bool(sequence.grad.any()) for sequence in sequences)


def test_what_does_not_go_with_nested_tensors():
    module = Attention(8, 2, batch_first=True)
    nested = torch.nested.as_nested_tensor([draw(3, 8), draw(2, 8)])
    tokens = draw(2, 3, 8)
    for call in (
        lambda: module(nested, nested, nested, torch.zeros(2, 3, dtype=torch.bool)),
        lambda: module(nested, tokens, tokens),
        lambda: Attention(8, 2)(nested, nested, nested),
    ):
        with pytest.raises(ValueError, match="nested tensors need batch_first=True, nested keys and values"):
            call()
    with pytest.raises(TypeError, match="key must be a floating-point tensor, got a nested tensor"):
        module(tokens, nested, nested)
