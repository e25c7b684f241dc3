"""Images against batches that the checkpoint's own processor makes by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.rows import every_row

import massieu
from massieu.errors import InputError
from massieu.probing.data.images import pictures_of
from massieu.probing.data.token_names import token_names

SIDE, PATCH = 24, 8
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = ["[PAD]", "[UNK]", "<s>", "</s>", "a", "temple", "flower", "digit", "of", "gold"]


def shuffled(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() > 1 else None
    return model.eval()


def photographs() -> list[Image.Image]:
    """Two coloured pictures and three grey ones, of several sizes."""
    drawn = np.random.default_rng(0)
    shapes = [(40, 60, 3), (30, 50, 3), (8, 8), (12, 9), (24, 24)]
    return [Image.fromarray(drawn.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]


def vision_model(**settings: Any) -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**SIZES, **{"image_size": SIDE, "patch_size": PATCH} | settings)).eval()


def language_model() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SIZES, vocab_size=9)).eval()


def tokenizer(words: list[str], **settings: Any) -> Any:
    """Splits at spaces; each word is a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    splits = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    splits.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=splits, **special, **settings)


def clip_images() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    (place / "later").mkdir()
    (place / ".hidden").mkdir()
    for number, picture in enumerate(photographs()):
        small = picture.resize((60, 40))
        small.save(place / ("later" if number > 2 else "") / f"picture {number}.{'png' if number % 2 else 'jpg'}")
    photographs()[0].resize((9, 9)).save(place / ".hidden" / "not this.png")
    (place / "notes.txt").write_text("no image")
    return place


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    from transformers import ViTImageProcessorPil

    place = tmp_path_factory.mktemp("vit")
    shuffled(vision_model()).save_pretrained(place)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor

    place = tmp_path_factory.mktemp("clip")
    special = {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0}
    text = {**SIZES, **special, "vocab_size": len(WORDS), "max_position_embeddings": 12}
    vision = {**SIZES, "image_size": SIDE, "patch_size": PATCH}
    shuffled(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))).save_pretrained(place)
    CLIPProcessor(clip_images(), tokenizer(WORDS, model_max_length=12)).save_pretrained(place)
    return place


def in_order(folder: Path) -> list[Path]:
    return [folder / name for name in ("picture 0.jpg", "picture 1.png", "picture 2.jpg")] + [
        folder / "later" / name for name in ("picture 3.png", "picture 4.jpg")
    ]


def same(one: Any, other: Any) -> None:
    left, right = (result.heads.sort("site", "head", "statistic") for result in (one, other))
    assert left["statistic"].to_list() == right["statistic"].to_list()
    np.testing.assert_allclose(left["value"].to_numpy(), right["value"].to_numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.medium
def test_a_folder_is_what_its_processor_makes_of_it(folder, vit):
    from transformers import ViTImageProcessorPil, ViTModel

    result = massieu.probe(vit, massieu.Images(folder), batch_size=2, statistics=["attention"])
    processor = ViTImageProcessorPil.from_pretrained(vit)
    opened = [Image.open(path).convert("RGB") for path in in_order(folder)]
    pixels = processor(opened, return_tensors="pt")["pixel_values"]
    by_hand = [{"pixel_values": pixels}]  # in one batch
    model, data = ViTModel.from_pretrained(vit).eval(), massieu.Batches(by_hand, documents=True)
    same(result, massieu.probe(model, data, statistics=["attention"]))
    assert result.run.text is not None
    assert result.run.text.source == f"5 images of {folder}" and result.run.text.documents == 5
    assert result.run.text.tokens == 5 * (1 + (SIDE // PATCH) ** 2)
    assert result.run.error_unit is not None and result.run.error_unit.count == 5
    example = result.details["examples"][0]
    names = example["tokens"]["image"]
    assert names[:5] == ["[CLS]", "row 1, column 1", "row 1, column 2", "row 1, column 3", "row 2, column 1"]
    assert len(names) == 10 and names[-1] == "row 3, column 3"
    assert example["title"] == "window 0 · picture 0.jpg"
    assert {site.query_tokens for site in result.run.sites} == {"image"}
    assert [len(row) for row in example["sites"]["0"]["entropy"]] == [10, 10]


@pytest.mark.medium
def test_images_in_memory_are_those_of_files(folder, vit):
    from transformers import ViTImageProcessorPil, ViTModel

    model, processor = ViTModel.from_pretrained(vit).eval(), ViTImageProcessorPil.from_pretrained(vit)
    paths = [str(path) for path in in_order(folder)]
    opened = [Image.open(path) for path in paths]
    arrays = [np.asarray(image.convert("RGB")) for image in opened]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    for images in (paths, opened, arrays):
        read = [np.asarray(image.read()) for image in pictures_of(images)[1]]
        assert all(np.array_equal(one, other) for one, other in zip(read, arrays, strict=True))
    named, other = (
        massieu.probe(model, massieu.Images(part, processor), statistics=["entropy"], draws=0)
        for part in (paths, tensors)
    )
    same(other, named)
    fewer = massieu.probe(model, massieu.Images(opened[:4], processor), statistics=["entropy"], draws=0)
    assert named.units is not None and fewer.units is not None and named.units.text != fewer.units.text


def test_an_image_that_is_not_square_has_its_own_rows():
    pixels = {"pixel_values": torch.zeros(1, 3, 16, 24)}
    names = token_names(vision_model(image_size=(16, 24)), pixels, 0)["image"]
    assert names[1:] == [f"row {row}, column {column}" for row in (1, 2) for column in (1, 2, 3)]
    assert token_names(language_model(), pixels, 0) == {}


@pytest.mark.medium
def test_without_text_the_vision_tower_alone_is_read(folder, clip):
    from transformers import CLIPModel, CLIPProcessor

    result = massieu.probe(clip, massieu.Images(folder), statistics=["entropy"], draws=0)
    tower = CLIPModel.from_pretrained(clip).eval().vision_model
    processor = CLIPProcessor.from_pretrained(clip)
    opened = [Image.open(path).convert("RGB") for path in in_order(folder)]
    pixels = processor(images=opened, return_tensors="pt")["pixel_values"]
    data = massieu.Batches([{"pixel_values": pixels}], documents=True)
    same(result, massieu.probe(tower, data, statistics=["entropy"], draws=0))
    assert result.run.model is not None and result.run.model.name.endswith("(vision_model)")


@pytest.mark.slow
def test_with_texts_both_towers_are_read_and_each_has_its_names(folder, clip):
    from transformers import CLIPModel, CLIPProcessor

    texts = ["a temple", "a flower of gold", "a digit", "a digit", "a digit of gold"]
    result = massieu.probe(clip, massieu.Images(folder, captions=texts), statistics=["attention"])
    processor = CLIPProcessor.from_pretrained(clip)
    opened = [Image.open(path).convert("RGB") for path in in_order(folder)]
    inputs = dict(processor(text=texts, images=opened, padding=True, return_tensors="pt"))
    data = massieu.Batches([inputs], documents=True)
    same(result, massieu.probe(CLIPModel.from_pretrained(clip).eval(), data, statistics=["attention"]))
    sides = {site.name.split(".")[0]: site.query_tokens for site in result.run.sites}
    assert sides == {"text_model": "text", "vision_model": "image"}
    tokens = result.details["examples"][0]["tokens"]
    assert len(tokens["image"]) == 10 and tokens["text"][:2] == ["a", "temple"]


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    """A decoder that reads images within its text, with a sign of nine tokens for each."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    place, words = tmp_path_factory.mktemp("llava"), [*WORDS, "<image>"]
    settings: dict[str, Any] = {"patch_size": PATCH, "num_additional_image_tokens": 1}
    settings |= {"vision_feature_select_strategy": "default", "image_token": "<image>"}
    splits = tokenizer(words, extra_special_tokens={"image_token": "<image>"})
    LlavaProcessor(clip_images(), splits, **settings).save_pretrained(place)
    vision = CLIPVisionConfig(**SIZES, image_size=SIDE, patch_size=PATCH)
    text = LlamaConfig(**SIZES, vocab_size=len(words), num_key_value_heads=2, pad_token_id=0)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=10, image_seq_length=9, vision_feature_layer=-1
    )
    shuffled(LlavaForConditionalGeneration(config)).save_pretrained(place)
    return place


@pytest.mark.medium
@every_row("texts", [None, ["<image> a temple", "a flower <image> of gold"]])
def test_a_decoder_that_reads_images_within_text_is_read_with_its_vision_tower(llava, texts):
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    pictures, captions = photographs()[:2], texts or ["<image>", "<image>"]
    result = massieu.probe(str(llava), massieu.Images(pictures, captions=texts), batch_size=2, statistics=["entropy"])
    inputs = LlavaProcessor.from_pretrained(llava)(images=pictures, text=captions, padding=True, return_tensors="pt")
    model = LlavaForConditionalGeneration.from_pretrained(llava, attn_implementation="eager").eval()
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output[1]}))
    with torch.no_grad():
        model(**inputs)
    assert {name.split(".")[0] for name in seen} == {"vision_tower", "language_model"}
    real = inputs["attention_mask"].bool()
    for name, weights in seen.items():
        counted = real if name.startswith("language_model") else torch.ones(2, 10, dtype=torch.bool)
        entropy = torch.special.entr(weights.double()).sum(-1).transpose(1, 2)[counted].mean(0)
        rows = result.heads.filter((result.heads["site"] == name) & (result.heads["statistic"] == "entropy"))
        assert rows["value"].to_list() == pytest.approx(entropy.tolist(), abs=1e-5)
    tokens = result.details["examples"][0]["tokens"]
    assert tokens["image"][:2] == ["[CLS]", "row 1, column 1"] and tokens["text"].count("<image>") == 9


def test_a_text_without_a_sign_for_its_image_is_refused_by_the_processor(llava):
    with pytest.raises(InputError, match="LlavaProcessor cannot read image 0"):
        massieu.probe(str(llava), massieu.Images(photographs()[:1], captions=["a temple"]))


def test_where_a_text_is_as_long_as_the_patches_are_many_nothing_is_named(folder, clip):
    result = massieu.probe(
        clip,
        massieu.Images([folder / "picture 0.jpg"], captions=["a temple of gold a flower of gold a digit"]),
        statistics=["entropy"],
    )
    assert result.details["examples"][0]["tokens"] == {}


def test_turned_and_transparent_images_are_as_one_sees_them(tmp_path, vit):
    upright = photographs()[0].resize((60, 40))
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90° when shown
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=turned)
    upright.save(tmp_path / "upright.png")
    (one,), (other,) = (pictures_of(tmp_path / name)[1] for name in ("turned.png", "upright.png"))
    assert np.array_equal(np.asarray(one.read()), np.asarray(other.read()))
    clear = upright.convert("RGBA")
    assert pictures_of([clear])[1][0].read().mode == "RGB"


@pytest.mark.medium
def test_bad_input(tmp_path, folder, vit, clip):
    from transformers import ViTImageProcessorPil

    empty, broken, cut = tmp_path / "empty", tmp_path / "broken.png", tmp_path / "cut.png"
    empty.mkdir()
    broken.write_bytes(b"no image at all")
    whole = (folder / "picture 1.png").read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    bert = tmp_path / "bert"
    language_model().save_pretrained(bert)
    bare = tmp_path / "bare"
    vision_model().save_pretrained(bare)
    model, processor = vision_model(), ViTImageProcessorPil.from_pretrained(vit)
    images = massieu.Images
    cases: list[tuple[Any, Callable[[], Any], str]] = [
        (vit, lambda: images(empty), "there is no image in .*empty; files of these kinds are read: .bmp"),
        (vit, lambda: images(tmp_path / "nowhere"), "nowhere is neither a file nor a folder"),
        (vit, lambda: images(broken), r"broken\.png is no image that can be read"),
        (vit, lambda: images(cut), r"cut\.png is no image that can be read"),
        (vit, lambda: images([]), "no image was given"),
        (vit, lambda: images([3]), "an image must be a file, an image of Pillow, an array or a tensor, got int"),
        (
            vit,
            lambda: images(torch.zeros(3, 8, 8)),
            "images must be a folder, or a list of files or images, got Tensor",
        ),
        (vit, lambda: images(folder, captions=["a"] * 5), r"\(ViTModel\) reads images alone: leave out the captions"),
        (vit, lambda: images(folder, captions=[1]), "captions must be strings"),
        (clip, lambda: images(folder, captions=["a"]), "a caption of its own, got 1 captions and 5 images"),
        (bert, lambda: images(folder), "bert has no processor of images"),
        (bare, lambda: images(folder), "bare has no processor of images"),
        (model, lambda: images(folder), "a model in memory needs a processor of images"),
        (model, lambda: images(folder, [{"pixel_values": torch.zeros(1)}]), "processor must be a processor of images"),
        (model, lambda: processor, r"for a tokenizer, and massieu.Images\(images, processor\) for a processor"),
        (language_model(), lambda: images(folder, processor), r"\(BertModel\) reads no images"),
    ]
    for model_path, data, match in cases:
        with pytest.raises(InputError, match=match):
            massieu.probe(model_path, data())


@pytest.mark.medium
def test_a_folder_of_images_from_the_command_line(folder, vit, tmp_path):
    from typer.testing import CliRunner

    from massieu.cli.commands import app

    runner = CliRunner()
    settings = ["--statistics", "entropy", "--out", str(tmp_path / "out")]
    ran = runner.invoke(app, ["probe", str(vit), "--images", str(folder), *settings])
    assert ran.exit_code == 0, ran.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert "5 images of" in page
    assert "50 tokens in 5" in ran.output
