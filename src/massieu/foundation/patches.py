"""Images as sequences of square patches, row by row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def patch_size(model: nn.Module) -> int | None:
    """The side of a model's square patches in pixels; None where its configuration names none."""
    config = getattr(model, "config", None)
    size = getattr(getattr(config, "vision_config", config), "patch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def num_patches(pixels: Float[Tensor, "B channels height width"], size: int) -> int:
    """The number of whole patches of an image; what is left at the right and the bottom belongs to none."""
    rows, columns = (extent // size for extent in pixels.shape[-2:])
    return rows * columns


def image_patches(
    pixels: Float[Tensor, "B channels height width"], size: int
) -> Float[Tensor, "B patches channels size size"]:
    """The whole patches of images."""
    rows, columns = (extent // size for extent in pixels.shape[-2:])
    whole = pixels[..., : rows * size, : columns * size]
    # (B, channels, rows, columns, size, size)
    blocks = whole.unflatten(3, (columns, size)).unflatten(2, (rows, size)).transpose(3, 4)
    return blocks.flatten(2, 3).transpose(1, 2)


def with_patches(
    pixels: Float[Tensor, "B channels height width"], patches: Float[Tensor, "B patches channels size size"]
) -> Float[Tensor, "B channels height width"]:
    """Images with other patches in place of their own; pixels that belong to no whole patch stay."""
    size = patches.shape[-1]
    rows, columns = (extent // size for extent in pixels.shape[-2:])
    blocks = patches.transpose(1, 2).unflatten(2, (rows, columns)).transpose(3, 4)
    changed = torch.clone(pixels)
    changed[..., : rows * size, : columns * size] = blocks.flatten(4, 5).flatten(2, 3)
    return changed


def rearranged_patches(
    pixels: Float[Tensor, "B channels height width"], size: int, source: Int[Tensor, " T"]
) -> Float[Tensor, "B channels height width"]:
    """Images with other of their patches at each place.

    Args:
        size: The side of a patch, in pixels.
        source: For each place, the number of the patch that is put there. A patch may be put at several places.
    """
    return with_patches(pixels, image_patches(pixels, size)[:, source])
