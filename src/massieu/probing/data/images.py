"""Images as input: files, folders and values in memory, made into batches by the checkpoint's own processor."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from massieu.errors import InputError, require_extra
from massieu.probing.data.text import Batch, TextReport
from massieu.probing.model.checkpoint import find_checkpoint, quiet, sentence
from massieu.probing.model.model import LoadedModel

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
"""Kinds of files that are read in folders; a file that is named may be of any kind that Pillow reads."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An image that is read when it is needed."""

    name: str
    read: Callable[[], Any]


def given_images(images: Any) -> tuple[str, list[Picture]]:
    """What was given, in words, and its images: those of folders in alphabetical order, folder by folder.

    Every file is looked at once, so that a broken one is found before any work is done.

    Args:
        images: a file or folder, or a list of files, folders, images of Pillow, arrays and tensors.

    Raises:
        InputError: no image; no such file; a file that is no image; something of another type.
        MissingExtraError: files without Pillow.
    """
    listed = [images] if isinstance(images, str | Path) else images
    if isinstance(listed, Tensor | np.ndarray | Mapping) or not isinstance(listed, Iterable):
        raise InputError(f"images must be a folder, or a list of files or images, got {type(images).__name__}")
    found: list[Picture] = []
    sources: list[str] = []
    for number, each in enumerate(listed):
        if isinstance(each, str | Path):
            files = _files(Path(each))
            found += [Picture(file.name, lambda file=file: _opened(file)) for file in files]
            sources.append(str(each))
        elif isinstance(each, Tensor | np.ndarray) or hasattr(each, "convert"):
            found.append(Picture(f"image {number}", lambda each=each: _in_colour(each)))
        else:
            raise InputError(
                f"an image must be a file, an image of Pillow, an array or a tensor, got {type(each).__name__}"
            )
    if not found:
        raise InputError("no image was given; name a folder or a list of images")
    said = ", ".join(sources) if len(sources) < 4 else f"{len(sources)} files and folders"
    number = "1 image" if len(found) == 1 else f"{len(found):,} images"
    return f"{number} of {said}" if sources else number, found


def given_captions(captions: Any, images: int) -> list[str] | None:
    """The texts beside so many images, one for each; None where there are none.

    Raises:
        InputError: they are not strings, or not as many.
    """
    if captions is None:
        return None
    listed = [captions] if isinstance(captions, str) else list(captions)
    if not all(isinstance(each, str) for each in listed):
        raise InputError("captions must be strings, one for each image")
    if len(listed) != images:
        raise InputError(f"each image needs a caption of its own, got {len(listed)} captions and {images} images")
    return listed


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = sorted(path.rglob("*"), key=lambda each: (each.parent, each.name))
        files = [f for f in inside if f.suffix.lower() in SUFFIXES and f.is_file() and not _hidden(f, path)]
        if not files:
            raise InputError(
                f"there is no image in {path}; files of these kinds are read: {', '.join(sorted(SUFFIXES))}"
            )
    elif path.is_file():
        files = [path]
    else:
        raise InputError(f"{path} is neither a file nor a folder; images are named by their path")
    pillow = require_extra("PIL.Image", "vision")
    for file in files:
        try:
            with pillow.open(file) as image:
                image.verify()
        except Exception as error:  # of whatever class the reader of this kind of file raises
            raise InputError(f"{file} is no image that can be read ({sentence(error)})") from error
    return files


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _opened(file: Path) -> Any:
    try:
        with require_extra("PIL.Image", "vision").open(file) as image:
            return _in_colour(image)
    except InputError:
        raise
    except Exception as error:  # a file that is cut off shows only where it is read
        raise InputError(f"{file} is no image that can be read ({sentence(error)})") from error


def _in_colour(image: Any) -> Any:
    """Upright and in red, green and blue; arrays and tensors are the processor's affair."""
    if not hasattr(image, "convert"):
        return image
    return require_extra("PIL.ImageOps", "vision").exif_transpose(image).convert("RGB")


# --- processors --------------------------------------------------------------------------------------------------------


def processor_of(name: str | PathLike[str], revision: str | None, trust_remote_code: bool) -> Any:
    """What the checkpoint makes its inputs of images with.

    Raises:
        InputError: its files have none, or it cannot be loaded here.
    """
    transformers = require_extra("transformers", "probe")
    require_extra("PIL.Image", "vision")
    checkpoint = find_checkpoint(name, revision)
    options = {**checkpoint.options, "trust_remote_code": trust_remote_code}
    reasons = []
    for kind in (transformers.AutoProcessor, transformers.AutoImageProcessor):
        try:
            with quiet():
                found = kind.from_pretrained(checkpoint.place, **options)
        except Exception as error:  # of whatever class: a file that is missing, a package, code of the checkpoint
            reasons.append(sentence(error))
            continue
        if hasattr(found, "image_processor") or hasattr(found, "preprocess"):
            return found
    why = f" ({reasons[-1]})" if reasons else ""
    raise InputError(f"{name} has no processor of images{why}; give one from Python: massieu.Images(images, processor)")


def reads_images(loaded: LoadedModel, processor: Any, texts: Sequence[str] | None) -> LoadedModel:
    """The part of the model that reads these images: all of it, or its vision tower where there is no text.

    Raises:
        InputError: it reads no images, or text beside them and none was given.
    """
    module: Any = loaded.module
    accepted = inspect.signature(module.forward).parameters
    if "pixel_values" not in accepted:
        raise InputError(f"{loaded.name} ({type(module).__name__}) reads no images")
    if texts is not None:
        if "input_ids" not in accepted:
            raise InputError(f"{loaded.name} ({type(module).__name__}) reads images alone: leave out the captions")
        return loaded
    if "input_ids" not in accepted or image_token(processor) is not None:
        return loaded
    tower = getattr(module, "vision_model", None)
    if tower is None or "pixel_values" not in inspect.signature(tower.forward).parameters:
        raise InputError(
            f"{loaded.name} ({type(module).__name__}) reads text beside images: give captions, one for each image"
        )
    return replace(loaded, module=tower, whole=tower, name=f"{loaded.name} (vision_model)")


def image_token(processor: Any) -> str | None:
    """What stands for an image in a text, where the model reads images within text."""
    found = getattr(processor, "image_token", None)
    return found if isinstance(found, str) else None


class ImageBatches:
    """Batches of images, made when they are needed: memory does not grow with their number.

    Args:
        processor: of `transformers`; is called with images, and with texts where there are any.
        texts: one for each image; where there are none and the model reads images within text, its sign for an image alone.

    Iterating raises:
        InputError: a file cannot be read, or the processor does not take the images.
    """

    def __init__(
        self, processor: Any, pictures: Sequence[Picture], texts: Sequence[str] | None, batch_size: int
    ) -> None:
        sign = image_token(processor)
        self.texts = [sign] * len(pictures) if texts is None and sign is not None else texts
        self.processor, self.pictures, self.batch_size = processor, pictures, batch_size
        self.report = TextReport()

    def __iter__(self) -> Iterator[Batch]:
        self.report = TextReport()
        for first in range(0, len(self.pictures), self.batch_size):
            part = slice(first, first + self.batch_size)
            pictures = self.pictures[part]
            given: dict[str, Any] = {"images": [picture.read() for picture in pictures]}
            if self.texts is not None:
                given |= {"text": list(self.texts[part]), "padding": True}
            names = tuple(picture.name for picture in pictures)
            self.report = replace(self.report, documents=first + len(pictures), windows=first + len(pictures))
            yield Batch(self._made(given, names), None, names)

    def _made(self, given: dict[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
        try:
            with quiet():
                made = dict(self.processor(**given, return_tensors="pt"))
        except Exception as error:  # of whatever class the processor raises
            raise InputError(
                f"{type(self.processor).__name__} cannot read {', '.join(names[:3])}{' …' if len(names) > 3 else ''} "
                f"({sentence(error)})"
            ) from error
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}
