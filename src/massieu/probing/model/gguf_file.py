"""What a GGUF file holds beside what transformers reads of it: it leaves out, without a word, what it does not know."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

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
        found = []
        if self.unread:
            found.append(
                f"settings of the GGUF file that transformers does not read: {', '.join(self.unread)}; "
                "compare with the model's config.json whether they are what it takes by default"
            )
        unused = self.numbers - sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        if unused > 0:
            found.append(
                f"the GGUF file holds at least {unused:,} numbers beside its head that the model does not use, as biases or "
                "layers that transformers does not know in this architecture"
            )
        return tuple(found)


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
    of_architecture = f"{architecture}."
    settings = {k.removeprefix(of_architecture): f for k, f in reader.fields.items() if k.startswith(of_architecture)}
    reading = require_extra("transformers.modeling_gguf_pytorch_utils", "probe").GGUF_TO_TRANSFORMERS_MAPPING["config"]
    known = reading.get(architecture) or reading.get(architecture.replace("moe", "_moe").replace("-", "_")) or settings
    scaling = settings.get("rope.scaling.type")
    scaled = [tensor.name for tensor in reader.tensors if tensor.name.startswith(_ROTARY)]
    if scaling is not None and scaling.contents() != "none":
        scaled.append(f"rope.scaling.type = {scaling.contents()}")
    if scaled and not architecture.startswith("gpt-oss"):
        raise InputError(
            f"{file} has scaled rotary frequencies ({', '.join(scaled)}), which transformers does not read from GGUF, so "
            "queries and keys would be wrong; take the model's safetensors"
        )
    return Contents(
        tuple(name for name, _ in Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
        sum(int(tensor.n_elements) for tensor in reader.tensors if not tensor.name.startswith((*_HEAD, *_ROTARY))),
        tuple(key for key in settings if key not in known and not key.startswith("rope.scaling.")),
    )
