"""transformers' registry: what is read of each architecture is right, and as docs/models.md says; scripts/model_survey.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scripts.models_page import FOLDER, page, power_of_ten, stored, within
from scripts.small_masks import NOT_A_NUMBER, odd_mask
from tests.support.probing import eager
from tests.support.rows import every_row
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention

from massieu.probing.capture.attention_call import AttentionCall, explicit_attention
from massieu.probing.capture.interface import EAGER, _model_function
from massieu.probing.capture.layout import BatchLayout, batch_layout
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.check import first_look

ROOT = Path(__file__).parents[3]
# Of the architectures that are built: each 72nd; those of which something is particular, or which are built in a moment
# where most of their kind take seconds; and of each way to be read or refused that these leave out the one with the fewest
# sites. The survey itself, `scripts/model_survey.py`, reads all.
EVERY = 72
WAY = ("outcome", "kind", "routes", "grades")
ALWAYS = (
    "bert", "bloom", "deberta", "deberta-v2", "deepseek_v32", "falcon", "fnet", "gemma4_audio", "gpt_neo", "gpt_oss", "gptj",
    "inkling2_text", "longformer", "mamba", "mpt", "nystromformer", "patchtst", "qwen3_vl_vision", "reformer", "roformer",
    "sew-d", "siglip", "swinv2", "t5", "whisper", "xlnet",
)  # fmt: skip


def small_llama(key_heads: int = 2) -> LlamaModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    return LlamaModel(LlamaConfig(**sizes, num_key_value_heads=key_heads)).eval()


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
def test_while_it_is_read_a_model_still_compares_the_name_of_its_implementation_as_its_own(stock, monkeypatch):
    """DeepSeek-V3.2 hides keys only under these names; under another its numbers were not its own."""
    model, seen, usual = small_llama(), [], LlamaAttention.forward

    def forward(self, *arguments, **keywords):
        name = self.config._attn_implementation
        seen.append((name in ("eager", "sdpa"), name == stock, name != stock, name == "flash_attention_2", hash(name)))
        return usual(self, *arguments, **keywords)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    model.set_attn_implementation(stock)
    calls: list[AttentionCall] = []
    with torch.no_grad(), capturing(model, calls.append):
        model(torch.arange(8)[None])
    (given,) = seen
    assert given[:4] == (True, True, False, False)
    assert given[4] != hash(stock)  # dispatched to us
    assert len(calls) == 1
    assert model.config._attn_implementation == stock


def test_patches_of_images_in_a_row_are_not_cut_at_the_number_of_rows():
    """Of such a batch the first two entries are no two items: the grid says what belongs together."""
    model = small_llama()
    patches = {"input_ids": torch.zeros(16, 4, dtype=torch.long), "grid_thw": torch.ones(1, 3, dtype=torch.long)}
    assert not batch_layout(model, patches, [1]).separable
    assert batch_layout(model, {"input_ids": patches["input_ids"]}, [16]) == BatchLayout()


def test_values_for_each_query_head_beside_grouped_keys_are_read(monkeypatch):
    model = small_llama(key_heads=2)
    attention = model.layers[0].self_attn
    attention.v_proj = torch.nn.Linear(16, 16, bias=False)
    calls: list[AttentionCall] = []
    model.set_attn_implementation("eager")

    def grouped(module, query, key, value, mask, scaling, **_):
        key = key.repeat_interleave(2, dim=1)
        weights = (query @ key.mT * scaling + (0 if mask is None else mask)).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(sys.modules[LlamaModel.__module__], "eager_attention_forward", grouped)
    batch = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad(), capturing(model, calls.append):
        model(**batch)
    (call,) = calls
    assert call.key.shape[1] == call.value.shape[1] == 4
    assert first_look(model, batch).check.passed


# Their files define two eager functions each: one that knows grouped keys or takes no scale, and one that does not.
_SEVERAL: dict[str, tuple[dict[str, Any], str]] = {
    "Llama4Vision": (
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
         "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        "Llama4VisionAttention",
    ),
    "Phi4Multimodal": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
         "intermediate_size": 32, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2,
         "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
                           "image_size": 28, "crop_size": 28},
         "audio_config": {"hidden_size": 16, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 16}},
        "Phi4MultimodalAttention",
    ),
}  # fmt: skip


@pytest.mark.medium
@every_row("architecture", _SEVERAL)
def test_of_several_eager_functions_in_a_file_it_is_the_modules_own(architecture):
    settings, kind = _SEVERAL[architecture]
    model = eager.create(architecture, settings)
    batch = {"input_ids": torch.arange(3, 12)[None]}
    if architecture == "Llama4Vision":
        batch = {"pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))}
    (call,), (right,) = eager.calls(model, batch), eager.attentions(model, batch, kind)
    assert first_look(model, batch).check.passed
    scores, weight = explicit_attention(call, torch.float64)
    assert torch.allclose(torch.softmax(scores + weight, -1), right, atol=1e-5)


def test_a_class_without_a_forward_of_its_own_has_the_eager_function_of_its_base_class(monkeypatch):
    """Whatever eager functions stand in the file of the class itself."""
    monkeypatch.setattr(sys.modules[__name__], "other_eager_attention_forward", print, raising=False)

    class Derived(LlamaAttention):
        pass

    attention = Derived(small_llama().config, 0)
    assert _model_function(attention, EAGER) is sys.modules[LlamaAttention.__module__].eager_attention_forward


def test_an_error_is_rounded_up_to_a_power_of_ten():
    assert [power_of_ten(error) for error in (1e-7, 1.1e-7, 9.9e-7, 0.0, 0.5)] == [
        "1e−07",
        "1e−06",
        "1e−06",
        "0",
        "1e00",
    ]


def test_the_page_is_what_the_stored_rows_give():
    newest, oldest = stored(), stored("5.9")
    assert (FOLDER / "models.md").read_text(encoding="utf-8") == page(newest, oldest)


@pytest.mark.parametrize("release", [path.stem.rpartition("-")[2] for path in sorted(FOLDER.glob("models/*.json"))])
def test_no_stored_row_is_wrong_or_a_crash(release):
    rows = stored(release)["architectures"]
    assert {row["architecture"]: row for row in rows if row["outcome"] not in ("read", "refused", "not built")} == {}
    assert all(row["error"] <= 1e-4 for row in rows if row["outcome"] == "read")
    assert sum(row["outcome"] == "read" for row in rows) >= 250


def test_all_that_is_read_is_read_in_float64_under_odd_masks_and_caps():
    """To 1e-6 of the model's own and of eager attention, wherever the model itself has numbers."""
    rows = [row for row in stored()["architectures"] if row["outcome"] == "read"]
    assert len(rows) >= 451
    assert {row["architecture"]: row["odd"] for row in rows if not _read_where_finite(row["odd"])} == {}


def _read_where_finite(odd: dict[str, Any]) -> bool:
    return within({name: value for name, value in odd.items() if value != NOT_A_NUMBER})


def test_odd_masks_leave_the_first_row_whole():
    assert odd_mask("middle", 2, 12).tolist() == [[1] * 12, [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert odd_mask("both sides", 2, 12).tolist() == [[1] * 12, [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]


@pytest.mark.slow
def test_architectures_are_read_as_the_page_says(tmp_path):
    """Built and read again here; on a release that is not stored, none may be wrong and none may crash."""
    release = ".".join(transformers.__version__.split(".")[:2])
    known = {row["architecture"]: row for row in stored()["architectures"] if row["outcome"] != "not built"}
    # Of several of one way the last counts: the smallest, unless one is read anyway.
    always = {*list(known)[::EVERY], *ALWAYS} & known.keys()
    in_order = sorted(known.values(), key=lambda row: (row["architecture"] in always, -row.get("sites", 0)))
    of_each_way = {str([row.get(what) for what in WAY]): row["architecture"] for row in in_order}
    names = sorted({*always, *of_each_way.values()})
    command = [sys.executable, "-m", "scripts.model_survey", *names, "--out", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=900)
    found = {row["architecture"]: row for row in json.loads((tmp_path / "rows.json").read_text())["architectures"]}
    assert sorted(found) == names
    bad = {n: row for n, row in found.items() if row["outcome"] not in ("read", "refused", "not built")}
    assert not bad
    assert {n: row["error"] for n, row in found.items() if row["outcome"] == "read" and not row["error"] <= 1e-4} == {}
    assert {
        n: row["odd"] for n, row in found.items() if row["outcome"] == "read" and not _read_where_finite(row["odd"])
    } == {}
    if (FOLDER / "models" / f"transformers-{release}.json").exists():
        expected = {row["architecture"]: row for row in stored(release)["architectures"]}
        said = ("outcome", "routes", "grades", "sites")
        differ = {
            n: [(row.get(what), expected[n].get(what)) for what in said]
            for n, row in found.items()
            if any(row.get(what) != expected[n].get(what) for what in said)
        }
        assert not differ
