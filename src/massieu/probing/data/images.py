"""Images as input: files, folders and values in memory, made into batches by the checkpoint's own processor."""

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
from massieu.probing.model.signature import forward_signature

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
"""Kinds of files that are read in folders; a file named by itself may be of any kind that Pillow reads."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An image that is read when it is needed."""

    name: str
    read: Callable[[], Any]


def pictures_of(images: Any) -> tuple[str, list[Picture]]:
    """A description of the user's images, and the images: those of folders in alphabetical order, folder by folder.

    Every file is opened once, so that a broken one is found before any work is done.

    Args:
        images: a file or folder, or a list of files, folders, images of Pillow, arrays and tensors.

    Raises:
        InputError: no image; no such file; a file that is not an image; something of another type.
        MissingExtraError: files without Pillow.
    """
    items = [images] if isinstance(images, str | Path) else images
    if isinstance(items, Tensor | np.ndarray | Mapping) or not isinstance(items, Iterable):
        raise InputError(f"images must be a folder, or a list of files or images, got {type(images).__name__}")
    pictures: list[Picture] = []
    sources: list[str] = []
    for number, item in enumerate(items):
        if isinstance(item, str | Path):
            files = _files(Path(item))
            pictures += [Picture(file.name, lambda file=file: _opened(file)) for file in files]
            sources.append(str(item))
        elif isinstance(item, Tensor | np.ndarray) or hasattr(item, "convert"):
            pictures.append(Picture(f"image {number}", lambda item=item: _upright_rgb(item)))
        else:
            raise InputError(
                f"an image must be a file, an image of Pillow, an array or a tensor, got {type(item).__name__}"
            )
    if not pictures:
        raise InputError("no image was given; name a folder or a list of images")
    number_of_images = "1 image" if len(pictures) == 1 else f"{len(pictures):,} images"
    if not sources:
        return number_of_images, pictures
    where = ", ".join(sources) if len(sources) < 4 else f"{len(sources)} files and folders"
    return f"{number_of_images} of {where}", pictures


def checked_captions(captions: Any, images: int) -> list[str] | None:
    """The captions as a list with one for each image; None without captions.

    Raises:
        InputError: they are not strings, or not as many as the images.
    """
    if captions is None:
        return None
    texts = [captions] if isinstance(captions, str) else list(captions)
    if not all(isinstance(text, str) for text in texts):
        raise InputError("captions must be strings, one for each image")
    if len(texts) != images:
        raise InputError(f"each image needs a caption of its own, got {len(texts)} captions and {images} images")
    return texts


def _files(path: Path) -> list[Path]:
    """The images that a path names, each of which Pillow can open.

    Raises:
        InputError: there is none, or one is broken.
    """
    if path.is_dir():
        paths = sorted(path.rglob("*"), key=lambda inner: (inner.parent, inner.name))
        files = [
            inner
            for inner in paths
            if inner.suffix.lower() in SUFFIXES and inner.is_file() and not _is_hidden(inner, path)
        ]
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
        except Exception as error:  # the reader of this kind of file may raise any class
            raise InputError(f"{file} is no image that can be read ({sentence(error)})") from error
    return files


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file, or a folder on the way to it, has a name that begins with a dot."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _opened(file: Path) -> Any:
    try:
        with require_extra("PIL.Image", "vision").open(file) as image:
            return _upright_rgb(image)
    except InputError:
        raise
    except Exception as error:  # a truncated file passes `verify`, and fails when its pixels are read
        raise InputError(f"{file} is no image that can be read ({sentence(error)})") from error


def _upright_rgb(image: Any) -> Any:
    """An image turned upright, in red, green and blue; arrays and tensors are left to the processor."""
    if not hasattr(image, "convert"):
        return image
    return require_extra("PIL.ImageOps", "vision").exif_transpose(image).convert("RGB")


# --- processors --------------------------------------------------------------------------------------------------------


def processor_of(name: str | PathLike[str], revision: str | None, trust_remote_code: bool) -> Any:
    """The processor of images in a checkpoint.

    Raises:
        InputError: the checkpoint has none, or it cannot be loaded here.
    """
    transformers = require_extra("transformers", "probe")
    require_extra("PIL.Image", "vision")
    checkpoint = find_checkpoint(name, revision)
    options = {**checkpoint.options, "trust_remote_code": trust_remote_code}
    reasons = []
    for kind in (transformers.AutoProcessor, transformers.AutoImageProcessor):
        try:
            with quiet():
                processor = kind.from_pretrained(checkpoint.place, **options)
        except Exception as error:  # of any class: a missing file, a missing package, code of the checkpoint
            reasons.append(sentence(error))
            continue
        if hasattr(processor, "image_processor") or hasattr(processor, "preprocess"):
            return processor
    reason = f" ({reasons[-1]})" if reasons else ""
    raise InputError(
        f"{name} has no processor of images{reason}; give one from Python: massieu.Images(images, processor)"
    )


def reads_images(loaded: LoadedModel, processor: Any, texts: Sequence[str] | None) -> LoadedModel:
    """The part of the model that reads these images: all of it, or only its vision tower if there is no text.

    Raises:
        InputError: the model reads no images, or it reads text with them and there is none.
    """
    module: Any = loaded.module
    parameters = forward_signature(module).parameters
    if "pixel_values" not in parameters:
        raise InputError(f"{loaded.name} ({type(module).__name__}) reads no images")
    if texts is not None:
        if "input_ids" not in parameters:
            raise InputError(f"{loaded.name} ({type(module).__name__}) reads images alone: leave out the captions")
        return loaded
    if "input_ids" not in parameters or image_token(processor) is not None:
        return loaded
    tower = getattr(module, "vision_model", None)
    if tower is None or "pixel_values" not in forward_signature(tower).parameters:
        raise InputError(
            f"{loaded.name} ({type(module).__name__}) reads text beside images: give captions, one for each image"
        )
    return replace(loaded, module=tower, whole=tower, name=f"{loaded.name} (vision_model)")


def image_token(processor: Any) -> str | None:
    """The token that stands for an image in a text, for models that read images within text; None for others."""
    token = getattr(processor, "image_token", None)
    return token if isinstance(token, str) else None


class ImageBatches:
    """Batches of images, formed when they are needed: memory does not grow with their number.

    Args:
        processor: of `transformers`; it is called with images, and with texts if there are any.
        texts: one for each image. Without texts, a model that reads images within text is given its image token alone.

    Iterating raises:
        InputError: a file cannot be read, or the processor does not take the images.
    """

    def __init__(
        self, processor: Any, pictures: Sequence[Picture], texts: Sequence[str] | None, batch_size: int
    ) -> None:
        token = image_token(processor)
        self.texts = [token] * len(pictures) if texts is None and token is not None else texts
        self.processor = processor
        self.pictures = pictures
        self.batch_size = batch_size
        self.report = TextReport()

    def __iter__(self) -> Iterator[Batch]:
        self.report = TextReport()
        for first in range(0, len(self.pictures), self.batch_size):
            rows = slice(first, first + self.batch_size)
            pictures = self.pictures[rows]
            arguments: dict[str, Any] = {"images": [picture.read() for picture in pictures]}
            if self.texts is not None:
                arguments |= {"text": list(self.texts[rows]), "padding": True}
            names = tuple(picture.name for picture in pictures)
            self.report = replace(self.report, documents=first + len(pictures), windows=first + len(pictures))
            yield Batch(self._processed(arguments, names), None, names)

    def _processed(self, arguments: dict[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
        """The processor's tensors for one batch."""
        try:
            with quiet():
                inputs = dict(self.processor(**arguments, return_tensors="pt"))
        except Exception as error:  # the processor may raise any class
            more = " …" if len(names) > 3 else ""
            raise InputError(
                f"{type(self.processor).__name__} cannot read {', '.join(names[:3])}{more} ({sentence(error)})"
            ) from error
        return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
