"""NaN and infinities: said first, with their first place, and never within a tolerance."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars
import pytest
import torch
from tests.support.probing import zoo
from tests.support.rows import every_row
from typer.testing import CliRunner

import massieu
from massieu.cli.commands import app
from massieu.errors import InputError
from massieu.probing.capture import interface
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.check import self_check_error
from massieu.probing.model.precision import relative_difference
from massieu.probing.population_layers import population_layers
from massieu.probing.result.result import ProbeResult
from massieu.probing.statistics.climb import _slope_parts, _summed
from massieu.probing.sums.accumulate import Ratio
from massieu.probing.sums.units import Units


def batches(name="bert", number=2, **options):
    return [zoo.inputs(name, seed=10 + i, **options) for i in range(number)]


def broken(weight, value=torch.nan, name="bert", entry=0):
    model = zoo.fresh(name)
    with torch.no_grad():
        model.get_parameter(weight).view(-1)[entry] = value
    return model


@pytest.mark.medium
@every_row(
    "weight, value, what",
    [
        ("encoder.layer.0.attention.self.query.weight", torch.nan, "NaN"),
        ("encoder.layer.2.output.dense.bias", -torch.inf, "infinity"),  # reaches no attention, only the output
        ("pooler.dense.weight", torch.nan, "NaN"),  # reaches nothing that is measured
    ],
)
def test_a_broken_weight_is_named_first(weight, value, what):
    result = massieu.probe(
        broken(weight, value), massieu.Batches(batches(number=1), window=20), statistics=["entropy"], draws=0
    )
    assert result.trouble == f"the model is broken: {what} in the weight {weight}"
    assert result.run.trouble is not None and result.run.trouble.first == weight
    check = result.run.self_check
    assert check.passed == ("pooler" in weight), "the check passes only where the model's numbers are numbers"
    page = result._page()
    header = page[page.index("<h1>") : page.index("</header>")]
    assert result.trouble.removeprefix("the") in header
    assert ("✓ passed" in header) == check.passed
    assert result.trouble in repr(result).splitlines()[1]


@pytest.mark.medium
@every_row("length", [20, 10])  # PyTorch's kernel makes zeros of a NaN query that sees fewer than 16 keys
def test_a_model_of_nan_alone_has_no_numbers(length):
    model = zoo.fresh("gpt2", n_layer=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    result = massieu.probe(model, massieu.Batches(batches(number=1, length=length), window=20))
    assert result.trouble is not None and "NaN" in result.trouble
    assert not result.run.self_check.passed
    assert result.run.self_check.error is None
    counted = result.heads.filter(~polars.col("statistic").str.contains("cosine|symmetric|reinitialised|rotation"))
    assert counted["value"].is_null().all()
    assert all("of 0 heads" not in f.sentence and "0 of 4" not in f.sentence for f in result.findings)


@pytest.mark.medium
def test_heads_without_a_number_are_not_counted_among_those_with_one():
    model = broken("encoder.layer.2.attention.self.query.bias", entry=2 * 12)  # head 2 of 4
    result = massieu.probe(model, massieu.Batches(batches(number=1), window=20), statistics=["attention"])
    sink = result.findings[0].sentence
    assert "Of 11 heads (1 head without a number), the most extreme is" in sink


def test_a_change_that_is_nan_is_not_one_that_does_not_sharpen():
    """A share over the changes that are numbers: 1 of 2 here, not 1 of 3."""
    slope = torch.tensor([0.5, -0.5, torch.nan]).reshape(1, 1, 3, 1)  # one head, one item, three queries, one dimension
    ratio = Ratio((1, 3, 1), Units())
    ratio.update(*_summed([_slope_parts((slope, slope), torch.ones(1, 3, 1))]))
    assert ratio.value()[0, 0, 0] == 0.5
    assert ratio.estimate().count[0, 0, 0] == 2


def overflowing():
    """A GPT-2 in float16 whose stream overflows where token 50 stands at position 3, and nowhere else."""
    model: Any = zoo.fresh("gpt2")
    with torch.no_grad():
        model.wpe.weight[3, 0] = 30_000
        model.wte.weight[:, 0] = 0
        model.wte.weight[50, 0] = 60_000
    return model.half()


def with_token(rows_with):
    found = []
    for number, given in enumerate(batches("gpt2", 3)):
        given["input_ids"][given["input_ids"] == 50] = 51
        given["input_ids"][:, 3] = 51
        if number in rows_with:
            given["input_ids"][1, 3] = 50
        found.append(given)
    return found


@pytest.mark.medium
@every_row("where, said", [([], None), ([1], "windows 3 to 5"), ([0, 2], "windows 0 to 2")])
def test_an_overflow_on_some_batches_only_is_found_there(where, said):
    result = massieu.probe(overflowing(), massieu.Batches(with_token(where), window=20), statistics="quick")
    if said is None:
        assert result.trouble is None
        return
    assert result.trouble is not None and result.run.trouble is not None and said in result.trouble
    assert "float16 may overflow" in result.trouble
    assert result.run.trouble.first in ("drop", "h.0.ln_1"), "the embeddings' sum, or what reads it first"
    entropy = result.heads.filter(polars.col("statistic") == "entropy")
    assert np.isfinite(entropy["value"].to_numpy()).all(), "other windows keep their numbers"


@pytest.mark.medium
def test_a_broken_input_is_named():
    images = [zoo.inputs("vit"), zoo.inputs("vit", seed=2)]
    images[1]["pixel_values"][2, 0, 0, 0] = torch.nan
    result = massieu.probe(zoo.model("vit"), images, statistics=["entropy"], draws=0)
    assert result.trouble == "the input is broken: NaN in 'pixel_values' of windows 3 to 5"


@pytest.mark.medium
def test_a_misreading_that_gives_nan_is_no_broken_model(monkeypatch):
    """Where the model's numbers are finite and ours are not, the self-check fails."""
    honest = interface._call_from
    monkeypatch.setattr(interface, "_call_from", lambda *a: replace(honest(*a), scale=float("nan")))
    with pytest.raises(InputError, match="self-check failed"):
        massieu.probe(zoo.model("bert"), batches(number=1), statistics="quick")


@every_row(
    "found, expected, good",
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, torch.nan], [1.0, torch.nan], False),
        ([torch.nan, torch.nan], [torch.nan, torch.nan], False),
        ([1.0, torch.inf], [1.0, torch.inf], False),
        ([1.0, torch.nan], [1.0, 2.0], False),
        ([1.0, 2.0], [torch.inf, 2.0], False),
    ],
)
def test_nan_is_within_no_tolerance(found, expected, good):
    error = relative_difference(torch.tensor(found), torch.tensor(expected))
    assert (error <= 1e30) == good


def test_the_self_check_of_one_site_does_not_pass_on_nan():
    calls = []
    model = zoo.model("bert")
    with torch.no_grad(), capturing(model, calls.append):
        model(**zoo.inputs("bert"))
    real = torch.ones(3, 20, dtype=torch.bool)
    nothing = torch.full_like(calls[0].output, torch.nan)
    assert not self_check_error(replace(calls[0], output=nothing), real) <= 1e30
    value = torch.full_like(calls[0].value, torch.nan)
    assert not self_check_error(replace(calls[0], value=value, output=nothing), real) <= 1e30


def test_blocks_of_nan_are_no_operators():
    model = broken("encoder.layer.1.attention.self.value.bias")
    with pytest.raises(InputError):
        population_layers(model, layer=1)


@pytest.mark.medium
def test_the_command_says_it_first_and_ends_with_3(tmp_path):
    import tokenizers
    import transformers

    words = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127))])
    }
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    model = broken("encoder.layer.1.output.dense.weight")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("abcdefghij" * 60)
    arguments = ["probe", tmp_path / "model", "--text", tmp_path / "text.txt", "--max-length", "32", "--out", tmp_path]
    ended = CliRunner().invoke(app, list(map(str, [*arguments, "--statistics", "entropy"])))
    assert ended.exit_code == 3, ended.output
    after = ended.stderr[ended.stderr.index("writing") :].splitlines()
    assert "NaN in the weight encoder.layer.1.output.dense.weight" in after[1]
    assert ProbeResult.load(tmp_path).trouble
