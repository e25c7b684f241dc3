"""Which permutations of its tokens a function or a model cannot tell (Z1, Z14)."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.func import functional_call

from massieu.foundation.arguments import (
    check_shape,
    check_values,
    described,
    floating,
    instance,
    integers,
    whole_number,
)
from massieu.foundation.doors import MODULE, door, function
from massieu.foundation.patches import image_patches, patch_size, with_patches
from massieu.foundation.short_repr import fields_html, fields_repr

_MOST_BEFORE = 8
"""Tokens that may stand before an image's patches."""


class PermutationGapResult(NamedTuple):
    """The largest difference that permuting tokens made, relative to the largest output; None for a gap not measured.

    Of a map with an output a token it is ‖f(πX) − πf(X)‖∞/‖f(X)‖∞, of any other ‖f(πX) − f(X)‖∞/‖f(X)‖∞.
    """

    content: float
    """Tokens permuted, positions and mask left in place."""
    with_positions: float | None
    """Tokens and positions permuted together, the mask left in place."""
    with_mask: float | None
    """Tokens, positions and both sides of the mask permuted together."""
    rounding: float
    """√ε of the output's dtype: a gap above it is more than rounding."""

    __repr__ = fields_repr
    _repr_html_ = fields_html

    def passes(self) -> tuple[str, ...]:
        """Names of the gaps that are no larger than rounding."""
        gaps = {"content": self.content, "with_positions": self.with_positions, "with_mask": self.with_mask}
        return tuple(name for name, gap in gaps.items() if gap is not None and gap <= self.rounding)


@door(function=function)
def permutation_gap(
    function: Callable[..., Tensor],
    tokens: Shaped[Tensor, "B L ..."],
    *,
    positions: Shaped[Tensor, "B L ..."] | None = None,
    mask: Shaped[Tensor, "*any L L"] | None = None,
    equivariant: bool = True,
    draws: int = 8,
    generator: torch.Generator | None = None,
) -> PermutationGapResult:
    """How far a model's output is from permuted when its tokens are, alone or with their position information (Z14).

    ``function(tokens)`` is called, with keywords ``positions`` and ``mask`` where those are given. Rounding depends on the
    order of summation, so an exact symmetry shows as a gap of some ε, not 0.

    Args:
        function: Deterministic, without dropout: it is called twice with the same tokens to check this.
        tokens: Permuted along the second dimension.
        positions: Position information of the tokens, permuted along its second dimension.
        mask: Attention mask between tokens, permuted along both last dimensions.
        equivariant: The output has the tokens' second dimension and should be permuted with it; else it should not change
            (log-probabilities of whole sequences, pooled outputs).
        draws: Number of permutations, the same ones for all gaps.
        generator: Draws the permutations; by default one seeded with 0.

    Raises:
        TypeError, ValueError: an argument is no tensor, there are fewer than two tokens, all are equal, or shapes do not fit.
            The output is not finite, not the same each time, not floating-point, or lacks the tokens' dimension.

    Example:
        >>> import torch
        >>> from massieu.posteriors import permutation_gap
        >>> tokens = torch.eye(3).unsqueeze(0)
        >>> permutation_gap(torch.relu, tokens).content, permutation_gap(lambda x: x.cumsum(1), tokens).content
        (0.0, 1.0)
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {described(function)}")
    length = _check(tokens, positions, mask, draws)
    generator = generator or torch.Generator().manual_seed(0)
    orders = [_order(length, generator).to(tokens.device) for _ in range(draws)]
    extras = {name: value for name, value in (("positions", positions), ("mask", mask)) if value is not None}
    with torch.no_grad():
        original = _checked_output(function(tokens, **extras), tokens, equivariant)
        size = original.abs().amax()
        rounding = float(torch.finfo(original.dtype).eps ** 0.5)
        again = _checked_output(function(tokens, **extras), tokens, equivariant)
        if bool((again - original).abs().amax() > rounding * size):
            raise ValueError("the function must be deterministic, got two outputs for the same tokens: is dropout on?")

        def gap(*permuted_names: str) -> float:
            differences = []
            for order in orders:
                permuted = dict(extras)
                for name in extras:
                    if name in permuted_names:
                        permuted[name] = _permuted(name, extras[name], order)
                output = _checked_output(function(tokens[:, order], **permuted), tokens, equivariant)
                expected = original[:, order] if equivariant else original
                differences.append((output - expected).abs().amax())
            largest = torch.stack(differences).amax()
            if size > 0:
                return float(largest / size)
            return float(largest > 0)

        with_positions = None if positions is None else gap("positions")
        with_mask = None if mask is None else gap("positions", "mask")
        return PermutationGapResult(gap(), with_positions, with_mask, rounding)


def _permuted(name: str, value: Tensor, order: Int[Tensor, "L"]) -> Tensor:
    """A mask permuted along both last dimensions, anything else along the second."""
    if name == "mask":
        return value[..., order, :][..., order]
    return value[:, order]


@door(model=MODULE)
def model_permutation_gap(
    model: nn.Module,
    input_ids: Int[Tensor, "B L"] | None = None,
    *,
    pixel_values: Float[Tensor, "B channels height width"] | None = None,
    draws: int = 8,
    generator: torch.Generator | None = None,
) -> PermutationGapResult:
    """`permutation_gap` of a Hugging Face model of texts or images: of its last hidden states, else of its logits (Z14).

    Texts: position indices are passed where the model takes them, 0 … L − 1 (from padding_idx + 1 in RoBERTa's kin), and
    permuted with the tokens. The mask is that of all tokens to all, or the causal one: whichever reproduces the model's own
    output; where neither does (windows, for one), or positions cannot be passed (relative biases), that gap is None.
    Sequences are taken to be without padding.

    Images: tokens are square patches, of the size in the model's configuration. The rows of its table of positions are
    permuted with the patches; without such a table, with_positions is None. with_mask is always None. Of a model that
    returns logits of whole images, the gap says how far these change.

    Use float32 or float64: rounding in half precision hides small gaps.

    Args:
        model: In evaluation mode, taking `input_ids` or `pixel_values`.
        input_ids: Of at least two tokens each; a few sequences of a few tens are enough.
        pixel_values: Images of at least two patches each, in place of `input_ids`.
        draws, generator: As of `permutation_gap`.

    Raises:
        TypeError, ValueError: not exactly one of `input_ids` and `pixel_values`, a model in training mode, one that does not
            take them or returns neither hidden states nor logits, an encoder with a decoder, one of texts with images, a
            model without square patches or whose tokens are not these patches, or as `permutation_gap`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from massieu.posteriors import model_permutation_gap
        >>> class Bag(torch.nn.Embedding):
        ...     def forward(self, input_ids, attention_mask=None):
        ...         return SimpleNamespace(last_hidden_state=super().forward(input_ids))
        >>> model_permutation_gap(Bag(5, 2).eval(), torch.tensor([[0, 1, 2]])).content
        0.0
    """
    if (input_ids is None) == (pixel_values is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"give either input_ids or pixel_values, got {given}")
    if any(module.training for module in model.modules()):
        raise ValueError("the model must be in evaluation mode, or dropout changes each call: call model.eval()")
    if input_ids is not None:
        return _text_gap(model, input_ids, draws, generator)
    return _image_gap(model, pixel_values, draws, generator)


def _text_gap(
    model: nn.Module, input_ids: Int[Tensor, "B L"], draws: int, generator: torch.Generator | None
) -> PermutationGapResult:
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise ValueError(f"{type(model).__name__} takes no input_ids; use permutation_gap with a function of your own")
    if "decoder_input_ids" in parameters:
        raise ValueError(f"{type(model).__name__} has an encoder and a decoder: pass one, as model.get_encoder()")
    check_shape("input_ids", integers("input_ids", input_ids), ("B", "L"))
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    positions = _positions(model, input_ids) if "position_ids" in parameters else None

    def run(tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        # A mask is always given: without one, positions out of order are read as several sequences packed into one.
        if mask is None:
            mask = tokens.new_ones(tokens.shape)
        position_ids = {} if positions is None else {"position_ids": positions}
        output = model(input_ids=tokens, attention_mask=mask, **position_ids, **options)
        return _states_or_logits(output)

    mask = _explicit_mask(run, model, input_ids, positions)
    return permutation_gap(run, input_ids, positions=positions, mask=mask, draws=draws, generator=generator)


def _states_or_logits(output: Any) -> Tensor:
    for name in ("last_hidden_state", "logits"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    raise TypeError(f"the model must return last_hidden_state or logits, got {described(output)}")


def _image_gap(
    model: nn.Module, pixel_values: object, draws: int, generator: torch.Generator | None
) -> PermutationGapResult:
    class_name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if "pixel_values" not in parameters:
        raise ValueError(f"{class_name} takes no pixel_values; use permutation_gap with a function of your own")
    if "input_ids" in parameters:
        raise ValueError(f"{class_name} reads texts with images: pass the part that reads images")
    pixels = floating("pixel_values", pixel_values)
    check_shape("pixel_values", pixels, ("B", "channels", "height", "width"))
    size = patch_size(model)
    if size is None:
        raise ValueError(f"the configuration of {class_name} must name patch_size, the side of square patches")
    patches = image_patches(pixels, size)
    length = patches.shape[1]
    with torch.no_grad():
        output = _states_or_logits(model(pixel_values=pixels))
    # Tokens of their own, such as one for the class, stand before the patches and stay.
    num_before = output.shape[1] - length if output.ndim == 3 else 0
    if not 0 <= num_before <= _MOST_BEFORE:
        raise ValueError(f"the tokens of {class_name} are not its patches: {output.shape[1]} tokens, {length} patches")
    table_name = _position_table(model, length)

    def run(patches: Tensor, positions: Tensor | None = None) -> Tensor:
        arguments = {"pixel_values": with_patches(pixels, patches)}
        if positions is None or table_name is None:
            output = model(**arguments)
        else:
            table = model.get_parameter(table_name)
            first = table.shape[-2] - length
            rows = torch.cat([torch.arange(first, device=table.device), first + positions[0]])
            output = functional_call(model, {table_name: table[..., rows, :]}, (), arguments)
        return _states_or_logits(output)[:, num_before:]

    positions = None
    if table_name is not None:
        positions = torch.arange(length, device=pixels.device).expand(patches.shape[:2])
    return permutation_gap(
        run, patches, positions=positions, equivariant=output.ndim == 3, draws=draws, generator=generator
    )


def _position_table(model: nn.Module, length: int) -> str | None:
    """The name of the parameter with a vector for each patch's position; None if there is not exactly one."""
    tables = [
        name
        for name, parameter in model.named_parameters()
        if any(word in name for word in ("position", "pos_embed"))
        and parameter.ndim >= 2
        and 0 <= parameter.shape[-2] - length <= _MOST_BEFORE
    ]
    return tables[0] if len(tables) == 1 else None


def _positions(model: nn.Module, input_ids: Tensor) -> Int[Tensor, "B L"]:
    """The indices the model itself would give to a sequence without padding."""
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    offset = 0
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        offset = table.padding_idx + 1
    return (torch.arange(input_ids.shape[-1], device=input_ids.device) + offset).expand(input_ids.shape)


def _explicit_mask(
    run: Callable[..., Tensor], model: nn.Module, input_ids: Tensor, positions: Tensor | None
) -> Float[Tensor, "B 1 L L"] | None:
    """The explicit mask, of all to all or causal, that reproduces the model's own output; None if neither does."""
    batch, length = input_ids.shape
    if length < 2 or positions is None:
        return None
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    hidden = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=input_ids.device)
    with torch.no_grad():
        unmasked = run(input_ids, positions)
        tolerance = torch.finfo(unmasked.dtype).eps ** 0.5 * float(unmasked.abs().amax())
        for candidate in (torch.zeros_like(hidden), hidden.triu(1)):
            mask = candidate.expand(batch, 1, length, length)
            difference = (run(input_ids, positions, mask) - unmasked).abs().amax()
            if float(difference) <= tolerance:
                return mask
    return None


def _order(length: int, generator: torch.Generator) -> Int[Tensor, "L"]:
    """A permutation that is not the identity."""
    while True:
        order = torch.randperm(length, generator=generator, device=generator.device)
        if not torch.equal(order, torch.arange(length, device=order.device)):
            return order


def _check(tokens: Tensor, positions: Tensor | None, mask: Tensor | None, draws: int) -> int:
    """The length of checked sequences."""
    instance("tokens", tokens, Tensor, "a tensor")
    if tokens.ndim < 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens must have shape (B, L, …) with L ≥ 2, got {tuple(tokens.shape)}")
    check_values(tokens=tokens)
    whole_number("draws", draws, least=1)
    length = tokens.shape[1]
    if not bool((tokens != tokens[:, :1]).any()):
        raise ValueError("tokens of a sequence must differ, or a permutation changes nothing; got equal ones")
    if positions is not None:
        shape = instance("positions", positions, Tensor, "a tensor").shape
        if len(shape) < 2 or shape[1] != length:
            raise ValueError(f"positions must have shape (B, {length}, …), got {tuple(shape)}")
    if mask is not None:
        shape = instance("mask", mask, Tensor, "a tensor").shape
        if tuple(shape[-2:]) != (length, length):
            raise ValueError(f"mask must have shape (…, {length}, {length}), got {tuple(shape)}")
    return length


def _checked_output(output: Any, tokens: Tensor, equivariant: bool) -> Float[Tensor, "..."]:
    """Return the output unchanged; raise unless it is finite and, if `equivariant`, has as many tokens on axis 1."""
    floating("what the function returns", output)
    if not bool(output.isfinite().all()):
        raise ValueError("the function's output must be finite, got NaN or an infinity: nothing can be compared")
    if equivariant and (output.ndim < 2 or output.shape[1] != tokens.shape[1]):
        raise ValueError(
            f"an equivariant function's output must have shape (B, {tokens.shape[1]}, …), got {tuple(output.shape)}; "
            "equivariant=False compares outputs without a token dimension"
        )
    return output
