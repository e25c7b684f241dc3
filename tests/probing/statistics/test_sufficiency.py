"""Contexts with equal counts: against models made by hand, which see counts alone, and passes of our own with hooks."""

from typing import Any

import numpy as np
import polars
import pytest
import torch
from torch import Tensor, nn

import massieu
from massieu.probing.checks.check import first_look
from massieu.probing.statistics import sufficiency
from massieu.probing.statistics.sufficiency import READERS, ReaderStates, sufficiency_sums
from massieu.report.questions import QUESTIONS

LENGTH, SIZE, VOCABULARY = 32, 16, 15
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))  # no special tokens
IMAGES = torch.randn(2, 3, 30, 20, generator=torch.Generator().manual_seed(0))


class Mixing(nn.Module):
    """Attention whose weights are those of positions alone; uniform ones if the bias is zero."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        nn.init.zeros_(self.query.weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x)[:, None] for part in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)[:, 0])


class Block(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.attention = Mixing(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Bags(nn.Module):
    """Embedded tokens without positions, and layers that average them."""

    def __init__(self, bias: Tensor, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.layers = nn.ModuleList([Block(bias) for _ in range(depth)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def measured(network: nn.Module, draws: int = 0, **inputs: Any) -> polars.DataFrame:
    batches = [inputs] if inputs else [{"input_ids": window} for window in IDS.split(1)]
    return massieu.probe(network.eval(), batches, statistics=["sufficiency"], draws=draws).layers


def values(rows: polars.DataFrame, name: str) -> list[float]:
    return rows.filter(rows["statistic"] == name)["value"].to_list()


def transformer(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaModel, RobertaConfig, RobertaModel, ViTConfig, ViTModel

    torch.manual_seed(0)
    if kind == "roberta":
        network: Any = RobertaModel(RobertaConfig(**SIZES, vocab_size=40, max_position_embeddings=40))
    elif kind == "llama":
        network = LlamaModel(LlamaConfig(**SIZES, vocab_size=40))
    else:
        network = ViTModel(ViTConfig(**SIZES, image_size=(30, 20), patch_size=5))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network.eval()


@pytest.mark.medium
def test_a_model_that_sees_counts_alone_has_no_gap():
    rows = measured(Bags(torch.zeros(LENGTH, LENGTH)))
    assert len(values(rows, "sufficiency_gap")) == 2  # what is before the first attention moves nowhere
    assert max(values(rows, "sufficiency_gap")) < 1e-9 and max(values(rows, "equal_counts_move")) < 1e-9
    assert min(values(rows, "other_counts_move")) > 1e-4


def test_with_weights_of_positions_the_gap_is_the_one_in_closed_form():
    """One layer: a reader's state moves by V applied to the change of the weighted mean of embeddings."""
    bias = 2 * torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    network = Bags(bias, depth=1).eval()
    inputs = {"input_ids": IDS[:1]}
    sites = first_look(network, inputs).sites
    sums = sufficiency_sums(network, sites, inputs, torch.Generator().manual_seed(5))
    context = np.arange(1, LENGTH - READERS)
    drawn = torch.Generator().manual_seed(5)
    order = context[torch.randperm(len(context), generator=drawn).numpy()]
    resample = context[torch.randint(len(context), (len(context),), generator=drawn).numpy()]
    ids = IDS[0].numpy()
    table = network.embedding.weight.detach().double().numpy()
    attention = network.layers[0].attention
    weights = np.exp(bias.double().numpy())
    weights /= weights.sum(1, keepdims=True)
    linear = (attention.out.weight.detach().double() @ attention.value.weight.detach().double()).numpy()
    states = [ids.copy(), ids.copy(), ids.copy()]
    states[1][context], states[2][context] = ids[order], ids[resample]
    window, reordered, resampled = (
        (table[each] + weights @ table[each] @ linear.T)[LENGTH - READERS :] for each in states
    )
    ((total, count),) = sums.values()
    moves = [((window - other) ** 2).sum() for other in (reordered, resampled)]
    spread = ((window - np.roll(window, 1, 0)) ** 2).sum()
    assert total[:, 0].numpy() == pytest.approx([moves[0], moves[0], moves[1]], rel=1e-4)
    assert count[:, 0].numpy() == pytest.approx([moves[1], spread, spread], rel=1e-4)
    assert count[:, 1].tolist() == [0, 0, 0]


def test_a_state_that_is_one_earlier_token_moves_as_much_under_any_other_order():
    """Of n tokens that all differ another one is there with probability 1 − 1/n, in either context: the gap is about 1."""
    drawn = torch.Generator().manual_seed(0)
    ratio = torch.zeros(2, dtype=torch.float64)
    table = torch.eye(LENGTH, dtype=torch.float64)
    for _ in range(400):
        sources = sufficiency._sources(LENGTH, torch.arange(LENGTH - READERS), drawn)  # pyright: ignore[reportPrivateUsage]
        assert sources is not None
        states = ReaderStates(*(table[source[3:4]] for source in (torch.arange(LENGTH), *sources)))
        ratio += torch.stack(sufficiency.sufficiency_gap(states))
    changed = ratio / 2 / 400  # the share of draws with another token there
    error = (1 / (LENGTH - READERS) / 400) ** 0.5
    assert changed.numpy() == pytest.approx([1 - 1 / (LENGTH - READERS)] * 2, abs=4 * error)


def test_the_two_contexts_keep_and_change_the_counts():
    inputs = {"input_ids": IDS[:1]}
    pair = sufficiency._text_contexts(inputs, torch.Generator().manual_seed(0))  # pyright: ignore[reportPrivateUsage]
    assert pair is not None
    equal, other = (each["input_ids"][0] for each in (pair.equal_counts, pair.other_counts))
    for ids in (equal, other):
        assert ids[0] == IDS[0, 0] and torch.equal(ids[-READERS:], IDS[0, -READERS:])
        assert not torch.equal(ids, IDS[0])
    counts = [torch.bincount(ids, minlength=VOCABULARY) for ids in (IDS[0], equal, other)]
    assert torch.equal(counts[0], counts[1]) and not torch.equal(counts[0], counts[2])
    assert bool((counts[2][counts[0] == 0] == 0).all())


@pytest.mark.medium
def test_the_states_are_those_of_three_passes_of_our_own():
    network, window = transformer("llama"), {"input_ids": IDS[:1]}
    pair = sufficiency._text_contexts(window, torch.Generator().manual_seed(5))  # pyright: ignore[reportPrivateUsage]
    assert pair is not None
    caught: list[Tensor] = []
    handle = network.layers[1].register_forward_hook(lambda _, __, output: caught.append(output.detach()[0].double()))
    with torch.no_grad():
        for inputs in (window, pair.equal_counts, pair.other_counts):
            network(**inputs)
    handle.remove()
    readers = [states[-READERS:] for states in caught]
    sums = sufficiency_sums(network, first_look(network, window).sites, window, torch.Generator().manual_seed(5))
    total, count = sums[max(sums) - 1]  # the last one is the norm
    moves = [float((readers[0] - other).square().sum()) for other in readers[1:]]
    assert total[:, 0].tolist() == pytest.approx([moves[0], moves[0], moves[1]], rel=1e-4)
    assert float(count[0, 0]) == pytest.approx(moves[1], rel=1e-4)


def test_a_layer_of_nan_is_counted_as_nan_and_not_left_out():
    network = Bags(torch.zeros(LENGTH, LENGTH)).eval()
    window = {"input_ids": IDS[:1]}
    sites = first_look(network, window).sites
    nn.init.constant_(network.layers[1].attention.out.weight, torch.nan)  # pyright: ignore
    sums = sufficiency_sums(network, sites, window, torch.Generator().manual_seed(0))
    first, last = sorted(sums)
    assert bool(sums[first][0].isfinite().all())
    assert bool(sums[last][0][:, 0].isnan().all()) and bool(sums[last][1][:, 0].isnan().all())


@pytest.mark.slow
def test_an_encoder_without_positions_has_no_gap_and_random_models_are_beside_it():
    network = transformer("roberta")
    assert min(values(measured(network), "sufficiency_gap")) > 1e-3
    nn.init.zeros_(network.embeddings.position_embeddings.weight)
    rows = measured(network, draws=2)
    gaps, random = values(rows, "sufficiency_gap"), values(rows, "sufficiency_gap/reinitialised")
    assert max(gaps) < 1e-9
    assert len(random) == len(gaps) and min(random) > 1e-3  # their positions are drawn anew


@pytest.mark.medium
def test_readers_of_an_image_are_patches():
    network = transformer("vit")
    assert min(values(measured(network, pixel_values=IMAGES), "sufficiency_gap")) > 1e-3
    nn.init.zeros_(network.embeddings.position_embeddings)
    assert max(values(measured(network, pixel_values=IMAGES), "sufficiency_gap")) < 1e-9
    pair = sufficiency._image_contexts(network, {"pixel_values": IMAGES}, torch.Generator())  # pyright: ignore[reportPrivateUsage]
    assert pair is not None and pair.num_tokens == 24
    patches, equal, other = (
        nn.functional.unfold(pixels, 5, stride=5)
        for pixels in (IMAGES, pair.equal_counts["pixel_values"], pair.other_counts["pixel_values"])
    )
    for moved in (equal, other):
        assert torch.equal(moved[:, :, pair.readers], patches[:, :, pair.readers])
    assert torch.equal(equal[0].sort(-1).values, patches[0].sort(-1).values)
    assert not torch.equal(other[0].sort(-1).values, patches[0].sort(-1).values)


@pytest.mark.medium
def test_padding_changes_nothing():
    network, pad = transformer("roberta"), torch.ones(3, 5, dtype=torch.long)
    padded = {
        "input_ids": torch.cat([IDS, pad], 1),
        "attention_mask": torch.cat([torch.ones_like(IDS), torch.zeros_like(pad)], 1),
    }
    alone, longer = measured(network, input_ids=IDS), measured(network, **padded)
    assert values(longer, "sufficiency_gap") == pytest.approx(values(alone, "sufficiency_gap"), rel=2e-3)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"input_ids": IDS[:, : READERS + 8]}, "no window had tokens enough"),
        ({"input_ids": torch.ones_like(IDS)}, "no window had tokens enough"),
        ({"inputs_embeds": torch.randn(2, 24, 16)}, "ids of one text"),
    ],
)
@pytest.mark.medium
def test_inputs_without_a_context_to_change_say_why(inputs, reason):
    result = massieu.probe(transformer("llama"), [inputs], statistics=["sufficiency"], draws=0)
    assert not values(result.layers, "sufficiency_gap") and reason in str(result.run.unavailable)


def test_windows_that_cannot_be_told_apart_are_left_out_with_the_reason():
    result = massieu.probe(
        Bags(torch.zeros(LENGTH, LENGTH)).eval(), [{"input_ids": IDS}], statistics=["sufficiency"], draws=0
    )
    assert "give batches of one window each" in str(result.run.unavailable)


def test_the_card_asks_the_question():
    assert QUESTIONS["sufficiency"][1] == "sufficiency_gap"
