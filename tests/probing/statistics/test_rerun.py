"""Windows run again: in another order against passes of our own with hooks, with gradients against responses in closed form."""

from typing import Any

import numpy as np
import polars
import pytest
import torch
from torch import Tensor, nn

import massieu
from massieu.probing.checks.check import first_look
from massieu.probing.statistics import response as response_file
from massieu.probing.statistics import symmetry
from massieu.probing.statistics.regressions import Regressions
from massieu.probing.statistics.response import Response, by_weights, collective_gain, explained

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.stack([3 + torch.randperm(36, generator=torch.Generator().manual_seed(i))[:24] for i in range(3)])
IMAGES = torch.randn(2, 3, 30, 20, generator=torch.Generator().manual_seed(0))


def model(kind: str) -> Any:
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaModel,
        RobertaConfig,
        RobertaModel,
        ViTConfig,
        ViTModel,
    )

    torch.manual_seed(0)
    if kind == "bert":
        network: Any = BertModel(BertConfig(**SIZES, vocab_size=40))
    elif kind == "roberta":
        network = RobertaModel(RobertaConfig(**SIZES, vocab_size=40, max_position_embeddings=30))
    elif kind == "llama":
        network = LlamaModel(LlamaConfig(**SIZES, vocab_size=40))
    else:
        network = ViTModel(ViTConfig(**SIZES, image_size=(30, 20), patch_size=5))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network.eval()


def measured(network: nn.Module, *groups: str, **inputs: Any) -> polars.DataFrame:
    return massieu.probe(network, [inputs or {"input_ids": IDS}], statistics=groups).layers


def values(rows: polars.DataFrame, name: str) -> list[float]:
    return rows.filter(rows["statistic"] == name)["value"].to_list()


def test_the_gap_is_that_of_two_passes_of_our_own():
    network, window = model("llama"), {"input_ids": IDS[:1]}
    order = symmetry._reordered_text(window, torch.Generator().manual_seed(5)).order  # pyright: ignore[reportPrivateUsage]
    assert order[[0, -1]].tolist() == [0, 23] and sorted(order.tolist()) == list(range(24)) != order.tolist()
    caught: list[Tensor] = []
    network.layers[1].register_forward_hook(lambda _, __, output: caught.append(output.detach()[0].double()))
    with torch.no_grad():
        for ids in (IDS[:1], IDS[:1, order]):
            network(input_ids=ids)
    states, other = caught[0], caught[1][order.argsort()]
    gaps = symmetry.permutation_gaps(network, sites_of(network, window), window, torch.Generator().manual_seed(5))
    total, count = gaps[max(gaps) - 1]  # the last one is the norm
    assert float(total[0, 0]) == pytest.approx(float((states - other).square().sum()), rel=1e-4)
    apart = {float((states - states.roll(-shift, 0)).square().sum()) for shift in range(1, 24)}
    assert min(abs(float(count[0, 0]) / each - 1) for each in apart) < 1e-4


def sites_of(network: nn.Module, inputs: dict[str, Any]) -> Any:
    return first_look(network, inputs).sites


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["roberta", "llama"])
def test_without_positions_and_masks_the_order_does_not_matter(kind):
    network = model(kind)
    with_positions = measured(network, "symmetry")
    assert min(values(with_positions, "permutation_gap")[1:]) > 1e-3
    moved = values(with_positions, "permutation_gap/moved_positions")
    assert len(moved) == len(values(with_positions, "permutation_gap")) > 3
    if kind == "llama":  # its mask does not move
        assert max(moved) > 1e-3
        return
    assert max(moved) < 1e-9
    nn.init.zeros_(network.embeddings.position_embeddings.weight)
    assert max(values(measured(network, "symmetry"), "permutation_gap")) < 1e-9


@pytest.mark.medium
def test_patches_of_an_image_change_places():
    network = model("vit")
    rows = measured(network, "symmetry", pixel_values=IMAGES)
    assert min(values(rows, "permutation_gap")[1:]) > 1e-3 and not values(rows, "permutation_gap/moved_positions")
    nn.init.zeros_(network.embeddings.position_embeddings)
    rows = measured(network, "symmetry", pixel_values=IMAGES)
    assert max(values(rows, "permutation_gap")) < 1e-9
    changed = symmetry._reordered_images(network, {"pixel_values": IMAGES}, torch.Generator())  # pyright: ignore[reportPrivateUsage]
    patches = nn.functional.unfold(IMAGES, 5, stride=5)
    assert torch.equal(nn.functional.unfold(changed.inputs["pixel_values"], 5, stride=5), patches[:, :, changed.order])


@pytest.mark.slow
def test_padding_changes_nothing():
    network, pad = model("roberta"), torch.ones(3, 5, dtype=torch.long)
    padded = {
        "input_ids": torch.cat([IDS, pad], 1),
        "attention_mask": torch.cat([torch.ones_like(IDS), torch.zeros_like(pad)], 1),
    }
    plain, longer = measured(network, "symmetry", "response"), measured(network, "symmetry", "response", **padded)
    assert plain["statistic"].to_list() == longer["statistic"].to_list()
    compared = ~plain["statistic"].str.contains("q_value|moved")
    assert longer.filter(compared)["value"].to_numpy() == pytest.approx(
        plain.filter(compared)["value"].to_numpy(), rel=2e-3
    )


class Averaging(nn.Module):
    """x + a Σ_j P_ij x_j with weights that positions alone decide, some times over."""

    def __init__(self, depth: int, *, causal: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.layers = nn.ModuleList([Block(causal) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.attention = Mixing(causal)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Mixing(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        nn.init.zeros_(self.query.weight)
        self.value.weight.data, self.out.weight.data = 0.7 * torch.eye(16), torch.eye(16)
        bias = 2 * torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
        self.register_buffer(
            "bias", bias.masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf) if causal else bias
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (f(x)[:, None] for f in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)[:, 0])


def regressed(outcome: np.ndarray, *given: np.ndarray) -> float:
    columns = np.stack([np.ones_like(outcome), *given], 1)
    fitted = columns @ np.linalg.lstsq(columns, outcome, rcond=None)[0]
    return float(((fitted - outcome.mean()) ** 2).sum() / ((outcome - outcome.mean()) ** 2).sum())


@pytest.mark.parametrize("causal", [False, True])
def test_the_response_of_linear_layers_is_the_one_in_closed_form(causal):
    network = Averaging(3, causal=causal).eval()
    inputs = {"x": torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(2))}
    weights = torch.softmax(network.layers[0].attention.bias.double(), -1).numpy()
    sums = response_file.responses(network, sites_of(network, inputs), inputs, torch.Generator().manual_seed(3))
    drawn = torch.Generator().manual_seed(3)
    able = [i for i in range(24) if (weights[i] > 0).sum() > response_file.FEWEST]
    tokens = [able[int(n)] for n in torch.randperm(len(able), generator=drawn)[: response_file.RESPONDING_TOKENS]]
    expected = np.zeros((3, 5))
    coupling = weights - np.diag(np.diag(weights))
    collective = np.linalg.inv(np.eye(24) - coupling)
    for depth in range(3):
        deep = np.linalg.matrix_power(np.eye(24) + 0.7 * weights, 3 - depth)
        for token in tokens:
            others = (weights[token] > 0) & (np.arange(24) != token)
            for place, response in ((0, 0.7 * weights), (2, deep)):
                by = coupling[token, others]
                expected[depth, place] += regressed(response[token, others], by)
                more = regressed(response[token, others], by, collective[token, others])
                expected[depth, place + 1] += more - regressed(response[token, others], by)
            expected[depth, 4] += (deep[token, others] ** 2).sum() / (deep[token] ** 2).sum()
    assert len(sums) == 3
    for depth, index in enumerate(sorted(sums)):
        total, count = sums[index]
        assert count[:, 0].tolist() == [len(tokens)] * 5
        assert total[:, 0].numpy() == pytest.approx(expected[depth], rel=1e-3, abs=1e-5)
        assert count[:4, 1].tolist() == [len(tokens)] * 4 and float(total[0, 1]) < 0.5 * len(tokens)
    assert not network.scale.requires_grad or network.scale.grad is None


def test_a_response_built_from_the_weights_is_explained_by_them_and_noise_is_not():
    drawn = torch.Generator().manual_seed(0)
    weights = torch.rand(200, generator=drawn, dtype=torch.float64)
    noise, other = torch.rand(2, 200, generator=drawn, dtype=torch.float64)
    response = Response(3 * weights + 1, torch.tensor(1.0), weights, other)
    assert float(by_weights(response, response)) == pytest.approx(1, abs=1e-12)
    assert float(collective_gain(response, response)) == pytest.approx(0, abs=1e-12)
    together = Response(weights + other, torch.tensor(1.0), weights, other)
    assert float(collective_gain(together, together)) == pytest.approx(
        1 - regressed((weights + other).numpy(), weights.numpy())
    )
    assert float(by_weights(Response(noise, response.itself, weights, other), response)) < 0.05
    assert float(explained(weights, torch.ones_like(weights))) == 0.0
    assert explained(torch.ones_like(weights), weights).isnan()
    assert float(explained(weights, other, other)) == pytest.approx(regressed(weights.numpy(), other.numpy()))


def test_weights_keep_requires_grad_and_get_no_gradient():
    network = model("bert")
    network.encoder.layer[0].requires_grad_(False)
    before = [p.requires_grad for p in network.parameters()]
    measured(network, "response")
    assert [p.requires_grad for p in network.parameters()] == before and all(
        p.grad is None for p in network.parameters()
    )


@pytest.mark.slow
def test_batch_size_moves_nothing_and_frozen_weights_are_read():
    network = model("llama").requires_grad_(False)
    groups = ["response", "symmetry"]
    one = massieu.probe(network, [{"input_ids": IDS}], statistics=groups).layers
    parts = massieu.probe(network, [{"input_ids": part} for part in IDS.split(2)], statistics=groups).layers
    assert parts["statistic"].to_list() == one["statistic"].to_list()
    compared = ~one["statistic"].str.contains("q_value") & (one["value"].abs() > 1e-6)
    assert parts.filter(compared)["value"].to_numpy() == pytest.approx(
        one.filter(compared)["value"].to_numpy(), rel=1e-3
    )


def test_inputs_that_cannot_be_put_in_another_order_say_why():
    result = massieu.probe(
        model("llama"), [{"inputs_embeds": torch.randn(2, 24, 16)}], statistics=["symmetry", "response"]
    )
    assert "ids of one text" in str(result.run.unavailable)
    assert values(result.layers, "response_by_weights"), result.run.unavailable


def test_windows_too_short_for_a_relation_leave_no_number():
    result = massieu.probe(model("bert"), [{"input_ids": IDS[:, :6]}], statistics=["symmetry", "response"])
    assert not values(result.layers, "permutation_gap") and not values(result.layers, "response_by_weights")
    assert "no window had tokens enough" in str(result.run.unavailable)


@pytest.mark.medium
def test_a_group_that_fails_at_the_end_leaves_the_others(monkeypatch):
    def broken(self: object, fence: object) -> None:
        raise ValueError("it broke")

    monkeypatch.setattr(Regressions, "measure", broken)
    result = massieu.probe(model("llama"), [{"input_ids": IDS}], statistics=["tap", "symmetry"])
    assert values(result.layers, "permutation_gap")
    assert {entry.statistic: entry.reason for entry in result.run.unavailable}["tap"].endswith(
        "report: ValueError: it broke"
    )
