"""What a GGUF file holds beside what transformers reads of it: it leaves out, without a word, what it does not know."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from massieu.errors import InputError, require_extra
from massieu.probing.model.gguf_sizes import check_sizes

UNROUNDED = {"F32", "F16", "BF16", "F64"}
"""Types of numbers that are no quantisation."""
_HEAD = ("output.", "cls.", "cls_out.")  # of the vocabulary or of classes: not a part of the trunk
_ROTARY = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")


@dataclass(frozen=True)
class Contents:
    """What is in a GGUF file.

    Attributes:
        types: Of the tensors' numbers, the most frequent first.
        numbers: How many there are outside the head.
        unread: Settings of the architecture that transformers does not read.
    """

    types: tuple[str, ...]
    numbers: int
    unread: tuple[str, ...]

    @property
    def quantised(self) -> bool:
        return bool(set(self.types) - UNROUNDED)

    def doubts(self, model: nn.Module) -> tuple[str, ...]:
        """Warnings where the model that was made of it has less than the file."""
        doubts = []
        if self.unread:
            doubts.append(
                f"settings of the GGUF file that transformers does not read: {', '.join(self.unread)}; "
                "compare with the model's config.json whether they are what it takes by default"
            )
        unused = self.numbers - sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        if unused > 0:
            doubts.append(
                f"the GGUF file holds at least {unused:,} numbers beside its head that the model does not use, as biases or "
                "layers that transformers does not know in this architecture"
            )
        return tuple(doubts)


def contents(file: Path) -> Contents:
    """Look into a file, as far as its tensors' names, types and sizes.

    Raises:
        InputError: no tensors, or rotary frequencies that transformers would not apply.
        Exception: what the reader raises on a file that is none.
    """
    gguf = require_extra("gguf", "gguf")
    check_sizes(file, gguf.GGML_QUANT_SIZES)
    reader = gguf.GGUFReader(file)
    if not reader.tensors:
        raise InputError(f"{file} holds no weights, only a description or a vocabulary")
    architecture = str(reader.fields["general.architecture"].contents())
    prefix = f"{architecture}."
    settings = {name.removeprefix(prefix): value for name, value in reader.fields.items() if name.startswith(prefix)}
    scalings = _rotary_scalings(reader, settings)
    if scalings and not architecture.startswith("gpt-oss"):
        raise InputError(
            f"{file} has scaled rotary frequencies ({', '.join(scalings)}), which transformers does not read from GGUF, so "
            "queries and keys would be wrong; take the model's safetensors"
        )
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    in_trunk = [tensor for tensor in reader.tensors if not tensor.name.startswith((*_HEAD, *_ROTARY))]
    read_names = _settings_read(architecture) or settings
    return Contents(
        types=tuple(name for name, _ in types.most_common()),
        numbers=sum(int(tensor.n_elements) for tensor in in_trunk),
        unread=tuple(name for name in settings if name not in read_names and not name.startswith("rope.scaling.")),
    )


def _settings_read(architecture: str) -> Any:
    """The settings that transformers reads of an architecture; None where it does not know it."""
    converting = require_extra("transformers.modeling_gguf_pytorch_utils", "probe")
    settings = converting.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    other_spelling = architecture.replace("moe", "_moe").replace("-", "_")
    return settings.get(architecture) or settings.get(other_spelling)


def _rotary_scalings(reader: Any, settings: dict[str, Any]) -> list[str]:
    """The tensors and the setting of a file that scale rotary frequencies."""
    scalings = [tensor.name for tensor in reader.tensors if tensor.name.startswith(_ROTARY)]
    kind = settings.get("rope.scaling.type")
    if kind is not None and kind.contents() != "none":
        scalings.append(f"rope.scaling.type = {kind.contents()}")
    return scalings
