"""Write hflayers.safetensors: what the modules of hopfield-layers (hflayers, f56f929, January 2022) compute.

    PYTHONPATH=path/to/hopfield-layers python tests/nn/data/make_hflayers.py

Each case has the keywords a module was made with (metadata), its state dict, inputs, masks, output, and the gradients of the
sum of the output's squares for the inputs.
"""

import json
from pathlib import Path

import hflayers
import torch
from safetensors.torch import save_file

NEVER = 1e-300
"""A threshold that stops no iteration early."""
PLAIN = {"normalize_stored_pattern": False, "normalize_state_pattern": False, "normalize_pattern_projection": False}
NOT_AFFINE = {f"{name}_affine": False for name in PLAIN}
STATIC = {"stored_pattern_as_static": True, "state_pattern_as_static": True, "pattern_projection_as_static": True}
SIZES = {"input_size": 6, "num_heads": 2}

# name: (module, keywords, shapes of the inputs, masks)
CASES = {
    "one input": ("Hopfield", SIZES, [(2, 5, 6)], ()),
    "three inputs": ("Hopfield", SIZES | {"update_steps_max": 1}, [(2, 5, 6), (2, 4, 6), (2, 5, 6)], ()),
    "all sizes differ": (
        "Hopfield",
        {"input_size": 6, "hidden_size": 4, "output_size": 5, "pattern_size": 3, "num_heads": 2}
        | {"stored_pattern_size": 7, "pattern_projection_size": 8, "update_steps_max": 3},
        [(2, 5, 7), (2, 4, 6), (2, 5, 8)],
        (),
    ),
    "masks": ("Hopfield", SIZES | PLAIN | NOT_AFFINE | {"update_steps_max": 2}, [(2, 5, 6)], ("padding", "association")),
    "mask of numbers": ("Hopfield", SIZES | {"update_steps_max": 2}, [(2, 5, 6)], ("numbers",)),
    "normalised space": (
        "Hopfield",
        SIZES
        | {"hidden_size": 4, "normalize_hopfield_space": True, "normalize_hopfield_space_affine": True}
        | {"update_steps_max": 2, "normalize_stored_pattern_eps": 1e-2, "normalize_hopfield_space_eps": 1e-3},
        [(2, 5, 6)],
        (),
    ),
    "static": ("Hopfield", STATIC | PLAIN | NOT_AFFINE | {"disable_out_projection": True}, [(2, 5, 6)], ()),
    "static, to convergence": (
        "Hopfield",
        STATIC
        | PLAIN
        | NOT_AFFINE
        | {"disable_out_projection": True, "scaling": 0.3, "update_steps_max": None, "update_steps_eps": 1e-14},
        [(2, 5, 6), (2, 3, 6), (2, 5, 6)],
        (),
    ),
    "to convergence": (
        "Hopfield",
        SIZES | {"scaling": 0.25, "update_steps_max": None, "update_steps_eps": 1e-14},
        [(2, 5, 6), (2, 4, 6), (2, 5, 6)],
        (),
    ),
    "static state": (
        "Hopfield",
        {"input_size": 6, "hidden_size": 6, "state_pattern_as_static": True, "update_steps_max": 1},
        [(2, 5, 6)],
        (),
    ),
    "static projection": ("Hopfield", {"input_size": 6, "pattern_projection_as_static": True}, [(2, 5, 6)], ()),
    "connected": (
        "Hopfield",
        SIZES | {"pattern_projection_as_connected": True, "update_steps_max": 1},
        [(2, 5, 6), (2, 4, 6), (2, 5, 6)],
        (),
    ),
    "connected and static": (
        "Hopfield",
        {"input_size": 6, "pattern_projection_as_connected": True, "pattern_projection_as_static": True},
        [(2, 5, 6)],
        (),
    ),
    "zero key, activation, no bias": (
        "Hopfield",
        SIZES | {"add_zero_association": True, "association_activation": "tanh", "input_bias": False}
        | {"update_steps_max": 2},
        [(2, 5, 6)],
        (),
    ),
    "length first": ("Hopfield", SIZES | {"batch_first": False, "update_steps_max": 1}, [(5, 2, 6)], ("padding",)),
    "pooling": ("HopfieldPooling", SIZES | {"quantity": 3, "update_steps_max": 2}, [(2, 5, 6)], ("padding",)),
    "pooling, output size": ("HopfieldPooling", SIZES | {"output_size": 4}, [(2, 5, 6)], ()),
    "layer": ("HopfieldLayer", SIZES | {"quantity": 7, "update_steps_max": 1}, [(2, 5, 6)], ()),
    "layer with targets": (
        "HopfieldLayer",
        SIZES
        | {"quantity": 7, "lookup_weights_as_separated": True, "stored_pattern_size": 5, "pattern_projection_size": 4},
        [(2, 5, 6)],
        (),
    ),
    "layer, length first": ("HopfieldLayer", SIZES | {"quantity": 7, "batch_first": False}, [(5, 2, 6)], ()),
}  # fmt: skip


def masks_of(names: tuple[str, ...], length: int, keys: int) -> dict[str, torch.Tensor]:
    found = {}
    if "padding" in names:
        found["stored_pattern_padding_mask"] = torch.arange(keys).expand(2, -1) >= torch.tensor([[keys], [keys - 2]])
    if "association" in names:
        found["association_mask"] = torch.ones(length, keys, dtype=torch.bool).triu(1)
    if "numbers" in names:
        found["association_mask"] = torch.randn(4, length, keys)
    return found


def main() -> None:
    torch.set_default_dtype(torch.float64)
    tensors, keywords = {}, {}
    for number, (case, (name, given, shapes, masks)) in enumerate(CASES.items()):
        torch.manual_seed(number)
        options = {"update_steps_eps": NEVER} | given
        module = getattr(hflayers, name)(**options)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        axis = 0 if given.get("batch_first", True) is False else 1
        hidden = masks_of(masks, inputs[min(1, len(inputs) - 1)].shape[axis], inputs[0].shape[axis])
        output = module(inputs[0] if len(inputs) == 1 else tuple(inputs), **hidden)
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        keywords[case] = {"module": name, **given}
        tensors |= {f"{case}/state/{key}": value for key, value in module.state_dict().items()}
        tensors |= {f"{case}/mask/{key}": value for key, value in hidden.items()}
        tensors |= {f"{case}/input/{place}": value.detach() for place, value in enumerate(inputs)}
        tensors |= {f"{case}/gradient/{place}": value for place, value in enumerate(gradients)}
        tensors[f"{case}/output"] = output.detach()
    path = Path(__file__).parent / "hflayers.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, {"keywords": json.dumps(keywords)})
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
