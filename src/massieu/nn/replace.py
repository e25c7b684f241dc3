"""`massieu.nn.Attention` in the place of PyTorch's multi-head attention, in existing models."""

from collections.abc import Callable

from torch import nn

from massieu.foundation.arguments import described, instance
from massieu.nn.attention import Attention, check_supported
from massieu.nn.softmax import SoftmaxHeads
from massieu.nn.strategy import Heads

_OTHER_PARAMETERS = ("in_proj_bias", "bias_k", "bias_v")
_PACKED_PARAMETERS = ("in_proj_weight", *_OTHER_PARAMETERS)
_SEPARATE_PARAMETERS = ("q_proj_weight", "k_proj_weight", "v_proj_weight", *_OTHER_PARAMETERS)
_OUTPUT_CLASSES = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def replace_attention(model: nn.Module, *, heads: Callable[[nn.MultiheadAttention], Heads] | None = None) -> nn.Module:
    """Replace every `torch.nn.MultiheadAttention` of a model by `massieu.nn.Attention`, in place.

    The new modules hold the very same Parameters, the same output projection and the same hooks, so that optimisers and
    handles made before stay right; names in the state dict are the same. Outputs and gradients equal those of before to
    rounding, also in `torch.nn.TransformerEncoder` and its kin, whose fast path is then not taken. Two things differ: a query
    that sees no key gets 0, not NaN, and weights that a training call with dropout returns are those before it. Replace before
    sharding (FSDP), compiling or adding adapters. A module that the model uses twice stays one. The random state is left alone.

    Args:
        model: Any module. All of it is checked first: where one part is refused, nothing is changed.
        heads: From each old module to the strategy of the new one's heads; by default `SoftmaxHeads()`, as before.

    Returns:
        The model; the new module where the model itself is a `torch.nn.MultiheadAttention`.

    Raises:
        TypeError: the model is no module, or `heads` gives no strategy.
        ValueError: there is nothing to replace; or a part that cannot be replaced, by its name and with the reason: a subclass,
            as quantisation and parametrisations make, adapters, sharded or pruned weights, a forward of its own.

    Example:
        >>> import massieu, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> weight = layer.self_attn.in_proj_weight
        >>> massieu.replace_attention(layer).self_attn.in_proj_weight is weight
        True
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    if heads is not None and (isinstance(heads, nn.Module) or not callable(heads)):
        raise TypeError(f"heads must be a function from the old module to a strategy, got {described(heads)}")
    attentions = {name: part for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)}
    if not attentions:
        raise ValueError(f"the model {type(model).__name__} has no torch.nn.MultiheadAttention to replace")
    for name, part in model.named_modules():
        holds_attention = any(isinstance(child, nn.MultiheadAttention) for child in part.children())
        if holds_attention and type(part).__module__.partition(".")[0] == "peft":
            raise ValueError(f"{name or 'the model'} is an adapter of peft around attention: replace before adapting")
    for name, old in attentions.items():
        reason = _why_not_replaceable(old)
        if reason:
            raise ValueError(f"{name or 'the model'} ({type(old).__name__}) cannot be replaced: {reason}")
    # All new modules are made before the first takes its place, so that an error leaves the model as it is.
    replacements = {old: _replacement(name or "the model", old, heads) for name, old in attentions.items()}
    for parent in list(model.modules()):
        for name, part in parent._modules.items():
            if isinstance(part, nn.MultiheadAttention):
                parent._modules[name] = replacements[part]
    return replacements[model] if isinstance(model, nn.MultiheadAttention) else model


def _why_not_replaceable(old: nn.MultiheadAttention) -> str | None:
    """The reason why a module cannot be replaced, or None."""
    attributes = vars(old)
    for part, classes in ((old, (nn.MultiheadAttention,)), (old.out_proj, _OUTPUT_CLASSES)):
        if type(part) not in classes:
            kind = f"{type(part).__module__}.{type(part).__name__}"
            where = "it" if part is old else "its output projection"
            return f"{where} is a {kind}, not torch.nn.{classes[0].__name__}, and has a way of its own to compute"
    if "forward" in attributes or attributes.get("_compiled_call_impl") is not None:
        return "its forward was changed or compiled; replace before that"
    foreign = _foreign_tensors(old)
    if foreign:
        return (
            f"its tensors are not PyTorch's own but {foreign}, as pruning and weight norm leave them; remove that first"
        )
    for name, parameter in old.named_parameters():
        if type(parameter) is not nn.Parameter:
            return (
                f"{name} is a {type(parameter).__name__}, not a plain Parameter; replace before sharding or quantising"
            )
    if any(getattr(hook, "with_module", False) for hook in attributes["_load_state_dict_pre_hooks"].values()):
        return "a hook before load_state_dict is bound to it; remove the hook first"
    return None


def _foreign_tensors(old: nn.MultiheadAttention) -> str | None:
    """The names of a module's tensors and parts, if they are not those of `torch.nn.MultiheadAttention`; else None."""
    expected = set(_PACKED_PARAMETERS if old._qkv_same_embed_dim else _SEPARATE_PARAMETERS)
    names = {name for name, parameter in old.named_parameters(recurse=False) if parameter is not None}
    names |= set(old._buffers) | set(old._modules) - {"out_proj"}
    output_names = {*old.out_proj._parameters, *old.out_proj._buffers} - {"weight", "bias"}
    names |= {f"out_proj.{name}" for name in output_names}
    # Biases may be absent, weights may not.
    missing_weights = {name for name in expected if "weight" in name} - names
    if not (names - expected or missing_weights):
        return None
    return ", ".join(sorted(names)) or "none"


def _replacement(
    name: str, old: nn.MultiheadAttention, heads: Callable[[nn.MultiheadAttention], Heads] | None
) -> Attention:
    """The new module, with the parameters, output projection and hooks of the old one."""
    strategy = SoftmaxHeads() if heads is None else heads(old)
    instance(f"what heads returns for {name}", strategy, Heads, "a strategy, as SoftmaxHeads() is")
    if strategy.projections != SoftmaxHeads.projections:
        raise ValueError(
            f"{type(strategy).__name__} cannot take the weights of {name}: they project {', '.join(strategy.projections)} alone"
        )
    has_bias_kv = old.bias_k is not None
    try:
        check_supported(strategy, dropout=old.dropout, add_bias_kv=has_bias_kv, add_zero_attn=old.add_zero_attn)
        weight = old.out_proj.weight
        strategy.bind(old.num_heads, old.head_dim, weight.device, weight.dtype)
    except ValueError as error:
        raise ValueError(f"{name} cannot be replaced: {error}") from error
    # On meta nothing is drawn, and no memory taken for numbers that are replaced at once.
    new = Attention(
        old.embed_dim,
        old.num_heads,
        old.dropout,
        old.in_proj_bias is not None,
        has_bias_kv,
        old.add_zero_attn,
        old.kdim,
        old.vdim,
        old.batch_first,
        device="meta",
    )
    new._parameters.update(old._parameters)
    new.out_proj = old.out_proj
    new.heads = strategy.train(old.training)
    new.training = old.training
    # The dictionaries of hooks themselves, to which handles refer, and attributes that were set from outside.
    hooks = {key: value for key, value in vars(old).items() if "_hooks" in key or key == "_is_full_backward_hook"}
    from_outside = {key: value for key, value in vars(old).items() if key not in vars(new)}
    vars(new).update(from_outside | hooks)
    return new
