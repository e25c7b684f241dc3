"""What a model loses without a head, against the same computed by hand: hooks on the projection, losses written out."""

import signal
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor, nn

import massieu
from massieu.errors import InputError
from massieu.probing.model.model import load_model
from massieu.probing.replaced.effect import Effects
from massieu.probing.statistics.catalogue import Selection

HEADS, SIZE, WINDOWS = 4, 8, 6
SIZES: dict[str, Any] = {
    "hidden_size": HEADS * SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": 40,
}
IDS = torch.randint(1, 40, (WINDOWS, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, 7:] = 0
BATCHES = [{"input_ids": IDS[i : i + 3], "attention_mask": MASK[i : i + 3]} for i in (0, 3)]
SAMPLED = [0, 1, 2, 3]  # the first four windows


def shuffled(model: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return model.eval()


def writer() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return shuffled(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)))


def encoder() -> Any:
    from transformers import BertConfig, BertModel

    return shuffled(BertModel(BertConfig(**SIZES)))


def probed(model: Any, replace: Any, batches: Any = BATCHES, **how: Any) -> Any:
    """With as little beside the replacements as a probe measures."""
    return massieu.probe(model, batches, replace=replace, statistics=["entropy"], draws=0, **how)


def losses(model: Any, row: int) -> Tensor:
    real = MASK[row].bool()
    with torch.no_grad():
        log_p = model(IDS[row : row + 1][:, real]).logits[0, :-1].double().log_softmax(-1)
    return -log_p.gather(1, IDS[row][real][1:, None])[:, 0]


def means(model: Any, projection: nn.Module) -> Tensor:
    """Of what the projection is given, over the real tokens of all windows."""
    seen: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    with torch.no_grad():
        for row in range(WINDOWS):
            model(IDS[row : row + 1][:, MASK[row].bool()])
    handle.remove()
    return torch.cat([each[0] for each in seen]).double().mean(0)


def set_to(projection: nn.Module, head: int, value: Tensor) -> Any:
    def change(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = arguments[0].clone()
        part = slice(head * SIZE, (head + 1) * SIZE)
        changed[..., part] = value[part].to(changed)
        return (changed,)

    return projection.register_forward_pre_hook(change)


def ratio(rows: list[Tensor]) -> tuple[float, float]:
    """Mean over all tokens, and its standard error over windows (Cochran 6.4)."""
    sums, counts = np.array([float(r.sum()) for r in rows]), np.array([len(r) for r in rows])
    value = sums.sum() / counts.sum()
    lowest = np.asarray(scipy.fft.dct((sums - value * counts) / counts.sum(), type=2, norm="ortho"))[
        1
    ]  # of four windows the one cosine
    return value, np.sqrt(len(rows)) * abs(lowest)


@pytest.mark.parametrize("rule", ["off", "off(mean)"])
def test_loss_without_each_head(rule):
    model = writer()
    records = probed(model, massieu.Replacement(rule, per="head")).run.replacements
    assert [(each.layer, each.head) for each in records] == [(layer, head) for layer in (0, 1) for head in range(HEADS)]
    each: Any
    for each in records:
        projection = model.model.layers[each.layer].self_attn.o_proj
        value = means(model, projection) if rule == "off(mean)" else torch.zeros(HEADS * SIZE)
        stock = [losses(model, row) for row in SAMPLED]
        handle = set_to(projection, each.head, value)
        changes = [losses(model, row) - stock_losses for row, stock_losses in zip(SAMPLED, stock, strict=True)]
        handle.remove()
        expected, error = ratio(changes)
        assert each.measure == "loss" and each.windows == len(SAMPLED)
        assert each.tokens == int(MASK[SAMPLED].sum()) - len(SAMPLED)
        assert each.value == pytest.approx(expected, rel=1e-3, abs=2e-5)
        assert each.standard_error == pytest.approx(error, rel=1e-3, abs=2e-5)
        assert each.high - each.value == pytest.approx(12.7062 * each.standard_error, rel=1e-5)  # t, 1 degree
        assert each.value - each.low == pytest.approx(each.high - each.value)


def test_a_model_without_a_loss_is_judged_by_its_output():
    model = encoder()
    records = probed(model, [massieu.Replacement(each, per="site") for each in ("off", "identity")]).run.replacements
    assert [(each.rule, each.layer, each.measure) for each in records] == [
        (rule, layer, "output") for rule in ("off", "identity") for layer in (0, 1)
    ]
    projection = model.encoder.layer[1].attention.output.dense
    changes = []
    for row in SAMPLED:
        ids = IDS[row : row + 1][:, MASK[row].bool()]
        with torch.no_grad():
            stock = model(ids).last_hidden_state[0].double()
            handle = projection.register_forward_pre_hook(lambda _, given: (torch.zeros_like(given[0]),))
            other = model(ids).last_hidden_state[0].double()
            handle.remove()
        spread = (stock - stock.mean(0)).square().sum(1).mean()
        changes.append((other - stock).square().sum(1) / spread)
    value, error = ratio(changes)
    assert records[1].value == pytest.approx(value, rel=1e-4) and records[1].standard_error == pytest.approx(
        error, rel=1e-3
    )
    assert records[2].value == records[2].standard_error == 0


def test_the_statistic_of_every_head():
    """It is the replacement of one head at a time, in the heads' table; computed when it is named, and only then."""
    model = writer()
    result = massieu.probe(model, BATCHES, statistics=["replacement"])
    rows = result.heads.filter(result.heads["statistic"] == "loss_without_head").sort("layer", "head")
    assert rows["value"].to_list() == [each.value for each in result.run.replacements]
    assert rows["standard_error"].to_list() == [each.standard_error for each in result.run.replacements]
    assert "loss_without_head" not in Selection.of(None).names
    with_other_statistics = massieu.probe(
        model, BATCHES, statistics=["replacement"], replace=massieu.Replacement("joint", windows=2)
    ).run.replacements
    assert [(each.rule, each.head is None) for each in with_other_statistics] == [
        ("joint", True),
        *[("off(mean)", False)] * 2 * HEADS,
    ]


def test_rules_of_the_users_own_and_their_number_of_windows():
    def doubled(call: Any) -> Tensor:
        return 2 * call.output

    records = probed(writer(), massieu.Replacement(doubled, windows=2)).run.replacements
    assert [(each.rule, each.windows, each.site) for each in records] == [("doubled", 2, None)]


def test_changes_that_are_not_finite_are_counted():
    def broken(call: Any) -> Tensor:
        output = call.output.clone()
        output[:, 6:] = torch.nan if call.site.name.startswith("layers.1") else output[:, 6:]
        return output

    result = probed(writer(), [" off(mean) ", broken])
    mean, broken_record = result.run.replacements
    expected = int(MASK[SAMPLED][:, :6].sum())  # predictions from the first six tokens
    assert (
        mean.rule == "off(mean)"
        and broken_record.tokens == expected
        and broken_record.value == pytest.approx(0, abs=1e-6)
    )
    lost = int(MASK[SAMPLED].sum()) - len(SAMPLED) - expected
    warning = f"with attention replaced by broken, {lost} of the tokens' changes are not finite, and are left out"
    assert result.run.warnings.count(warning) == 1


def test_padding_that_is_not_a_number_is_in_no_mean():
    output, real = torch.randn(2, 5, HEADS, SIZE), torch.ones(2, 5, dtype=torch.bool)
    real[1, 3:] = False
    effects = Effects(None, (), [])  # pyright: ignore[reportArgumentType]
    effects.add("site", output.masked_fill(~real[..., None, None], torch.nan), real)
    total, count = effects.sums["site"]
    torch.testing.assert_close(total / count, output[real].double().mean(0))


def test_a_rule_that_ends_on_the_way_loses_nothing_else(monkeypatch):
    from massieu.probing.replaced import effect

    calls: list[Any] = []
    monkeypatch.setattr(effect, "_MOST_LOGITS", 1)  # one window at a time: two calls each

    def ends(call: Any) -> Tensor:
        calls.append(call)
        if len(calls) > 6:
            raise RuntimeError("no more")
        return call.output

    result = probed(writer(), [ends, "off"])
    warning = "attention replaced by ends could not be measured and is left out (no more)"
    assert [each.rule for each in result.run.replacements] == ["off"] and result.run.warnings.count(warning) == 1
    assert result.run.replacements[0].windows == len(SAMPLED) and len(result.table) > 0


def test_windows_are_counted_and_not_the_blocks_of_them():
    ids = torch.randint(1, 40, (700, 3), generator=torch.Generator().manual_seed(1))
    result = probed(writer(), massieu.Replacement("off", windows=70), [{"input_ids": ids}])
    assert result.run.replacements[0].windows == 70  # more than a standard error has units


def test_draws_do_not_depend_on_the_rules_before():
    rules = (["resample(2)"], ["off", "resample(2)"])
    one, other = (probed(writer(), each, seed=5).run.replacements[-1] for each in rules)
    assert one.rule == other.rule and one.value == other.value


def test_batches_do_not_change_it():
    model = writer()
    whole = [{"input_ids": IDS, "attention_mask": MASK}]
    one, other = (probed(model, ["off(mean)", "top_k(2)"], data) for data in (BATCHES, whole))
    for a, b in zip(one.run.replacements, other.run.replacements, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-4, abs=1e-6)


def test_an_interruption_keeps_whole_windows(monkeypatch):
    from massieu.probing.replaced import effect

    model, calls = writer(), []
    monkeypatch.setattr(effect, "_MOST_LOGITS", 1)  # one window at a time

    def progress(state: Any) -> None:
        if state.stage.startswith("replacing"):
            calls.append(state.stage)
            if len(calls) == 6:
                signal.raise_signal(signal.SIGINT)

    result = probed(model, ["off", "joint", "top_k(2)", "window(2)"], run=massieu.Run(progress=progress))
    assert not result.complete
    assert {each.windows for each in result.run.replacements} == {1}


def test_bad_calls():
    def wrong(call: Any) -> Tensor:
        return call.query[:, :1]

    cases: Any = (
        (lambda: "softmax", "unknown rule 'softmax'"),
        (lambda: [3], "a rule must be a text or a function of an attention call, got int"),
        (lambda: massieu.Replacement("top_k"), "top_k needs a number of keys"),
        (lambda: massieu.Replacement("off", per="layer"), "per must be 'all', 'site' or 'head', got 'layer'"),  # pyright: ignore[reportArgumentType]
        (lambda: massieu.Replacement("off", windows=0), "windows of a replacement must be at least 1, got 0"),
        (lambda: wrong, "a rule must return outputs of shape"),
        (lambda: 3, "replace must be a rule or a list of rules, got 3"),
    )
    for replace, match in cases:
        with pytest.raises(InputError, match=match):
            massieu.probe(writer(), BATCHES, replace=replace())


def test_each_replacement_is_measured_on_its_own_number_of_windows():
    model = writer()
    few, many = massieu.Replacement("off", windows=1), massieu.Replacement("top_k(2)", windows=9)
    one, other = probed(model, [few, many]).run.replacements
    assert (one.windows, other.windows) == (1, len(SAMPLED))
    assert other.value == probed(model, many).run.replacements[0].value
    row = SAMPLED[0]
    stock = losses(model, row)
    with massieu.replaced(model, few):
        changed = losses(model, row)
    assert one.tokens == len(stock)
    assert one.value == pytest.approx(float((changed - stock).mean()), rel=1e-3, abs=2e-5)


class Picture(nn.Module):
    """Its tokens stand in rows and columns."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0].unflatten(1, (2, -1))


def test_an_output_that_is_not_one_of_tokens_is_refused_before_the_text_is_read():
    match = r"whose output has shape \(batch, tokens, width\), and that of Picture has shape \(1, 2, 3, 16\)"
    with pytest.raises(InputError, match=match):
        massieu.probe(Picture().eval(), [{"x": torch.randn(3, 6, 16)}], replace="off")


def test_a_checkpoint_with_a_language_head_is_judged_by_its_loss(tmp_path):
    writer().save_pretrained(tmp_path)
    assert type(load_model(tmp_path, tokenizer=False, head="if any").whole).__name__ == "LlamaForCausalLM"
    encoder().save_pretrained(tmp_path / "bert")
    assert type(load_model(tmp_path / "bert", tokenizer=False, head="if any").whole).__name__ == "BertModel"
