"""The first look at a model: can it be read, where does it attend, and is what was captured its own attention?

The self-check recomputes attention in float64 from what was captured. It compares numbers, so it says nothing where there are
none: a NaN or an infinity is not within any tolerance, and is told apart from a wrong reading.
"""

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, explicit_attention
from massieu.probing.capture.layout import BatchLayout, batch_layout
from massieu.probing.capture.sites import FirstPass, SiteInfo, find_sites, first_pass, inside
from massieu.probing.capture.tokens import real_tokens
from massieu.probing.checks.nonfinite import at_real
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.forward import decoder_given, output_tensor, real_mask, run, run_first
from massieu.probing.model.model import READABLE
from massieu.probing.model.model_inputs import model_inputs
from massieu.probing.model.precision import coarsest, computed_in, relative_difference, tolerance


@dataclass(frozen=True)
class SelfCheck:
    """How far the probe's attention and outputs are from the model's own, relative, on the first batch.

    Attributes:
        error: the largest in units of what is allowed there, of all sites with finite numbers; NaN where no site has them.
        tolerance: what rounding explains at that site, in the type of numbers in which the forward pass computed it.
        finite: the model's own numbers were finite; else it cannot pass.
    """

    error: float
    tolerance: float
    site: str
    finite: bool = True

    @property
    def passed(self) -> bool:
        return self.finite and self.error <= self.tolerance


@dataclass(frozen=True)
class FirstLook:
    """What the first batch showed.

    Attributes:
        unexplained: keyword arguments of attention that are not known.
        silent: modules that look like attention but were not seen attending.
        refused: modules whose attention cannot be read, with the reason.
    """

    sites: list[SiteInfo]
    check: SelfCheck
    unexplained: list[str]
    silent: list[str]
    refused: dict[str, str]
    layout: BatchLayout


def check_readable(model: nn.Module) -> None:
    """What can be said of a model of transformers before any text is read.

    Raises:
        InputError: nothing in it looks like attention.
    """
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    uses_interface = any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)
    if not uses_interface and not silent_attention(model, set()):
        raise InputError(_why_nothing_was_read(model, {}))


def check_evaluating(modules: Iterable[nn.Module]) -> None:
    """Raises:
    InputError: one of them is in training mode.
    """
    if any(module.training for module in modules):
        raise InputError("the model is in training mode, so dropout would change its numbers; call model.eval() first")


def first_look(model: nn.Module, inputs: dict[str, Any]) -> FirstLook:
    """Find the attention sites by one forward pass and compare everything with the stock model's.

    It takes the batch's first item, or the first two where one of them is padded: only then does an item tell anything that
    another does not. Where a batch cannot be cut into items it takes all of it.

    Raises:
        InputError: no attention was seen, the self-check failed, or the model's output is random.
    """
    prepared = model_inputs(model, inputs, items=2)
    masks = [real_mask(prepared, decoder=decoder) for decoder in (False, True)]
    if all(mask is None or bool(mask.all()) for mask in masks):
        prepared = model_inputs(model, inputs, items=1)
    with torch.no_grad():
        stock = output_tensor(model, run_first(model, prepared))
    seen = first_pass(model, prepared, look=lambda call: _errors(call, prepared))
    if not seen.calls:
        raise InputError(_why_nothing_was_read(model, seen.refused))
    sites = find_sites(model, seen)
    check = _self_check(seen, sites, prepared, stock, output_tensor(model, seen.output))
    if check.finite and not check.passed:
        with torch.no_grad():
            second_output = output_tensor(model, run(model, prepared))
        raise InputError(_why_check_failed(model, check, seen.unexplained, _relative_error(second_output, stock)))
    attending = {call.site.module_name for call in seen.calls} | set(seen.refused)
    layout = batch_layout(model, prepared, seen.sequences)
    silent = silent_attention(model, attending)
    return FirstLook(sites, check, sorted(seen.unexplained), silent, seen.refused, layout)


def _why_check_failed(
    model: nn.Module, check: SelfCheck, unexplained: Collection[str], error_of_two_passes: float
) -> str:
    # Not a comparison with >, which NaN would pass.
    if not error_of_two_passes <= check.tolerance:
        return (
            f"the output of {type(model).__name__} is random: two passes over the same batch differ by "
            f"{error_of_two_passes:.1e} (relative); turn off what draws at random, such as dropout or sampling, to probe it"
        )
    clue = ""
    if unexplained:
        clue = f"; its attention was given {', '.join(sorted(unexplained))}, which is not known"
    return (
        f"self-check failed at {check.site}: attention recomputed from what was captured differs from the model's own "
        f"by {check.error:.1e} (relative; allowed {check.tolerance:.0e}), so its statistics would be wrong{clue}"
    )


@dataclass(frozen=True)
class _CallErrors:
    """What the self-check saw of one call.

    Attributes:
        errors: the error if the call's tokens are the text's, and if they are the decoder's; by whether it is the decoder.
        dtype: in which the model computed it.
    """

    errors: dict[bool, float]
    dtype: torch.dtype


def _errors(call: AttentionCall, inputs: dict[str, Any]) -> _CallErrors:
    """The self-check's errors of one call, before it is known whether its tokens are the decoder's."""
    errors = {}
    for decoder in {False, decoder_given(inputs)}:
        real = real_tokens(call, inputs, decoder=decoder)
        if real is None:  # every query's output is the model's own, padding or not
            real = torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool, device=call.query.device)
        error = self_check_error(call, real)
        # Where the model's numbers are finite and ours are not, it is misread, not broken.
        if math.isnan(error) and _finite(call, real):
            error = math.inf
        errors[decoder] = error
    return _CallErrors(errors, computed_in(call.query, call.key, call.value, call.output))


def _self_check(
    seen: FirstPass, sites: list[SiteInfo], inputs: dict[str, Any], stock: Tensor, probed: Tensor
) -> SelfCheck:
    """The check of the site, or of the model's output, whose error is the largest beside its tolerance.

    Args:
        stock: the model's output.
        probed: the same of a pass whose attention was captured.
    """
    in_decoder = {info.site: info.in_decoder for info in sites}
    errors_of_calls: list[_CallErrors] = seen.noted
    checks: list[SelfCheck] = []
    for call, call_errors in zip(seen.calls, errors_of_calls, strict=True):
        # The output's type is no witness: accelerate turns the output of a pass in bfloat16 into float32. Nor is float64 one,
        # since most models of transformers form their softmax in float32 whatever the type of the rest.
        allowed = tolerance(coarsest(call_errors.dtype, stock.dtype, torch.float32))
        checks.append(SelfCheck(call_errors.errors[in_decoder[call.site]], allowed, call.site.name))
    real = real_mask(inputs, decoder=decoder_given(inputs))
    if real is not None and sites[-1].tokens_first:
        real = real.mT
    output_error = relative_difference(at_real(probed, real), at_real(stock, real))
    checks.append(SelfCheck(output_error, max(check.tolerance for check in checks), "the model's output"))
    compared = [check for check in checks if not math.isnan(check.error)]
    if not compared:
        return replace(checks[0], finite=False)
    worst = max(compared, key=lambda check: check.error / check.tolerance)
    return replace(worst, finite=len(compared) == len(checks))


def _finite(call: AttentionCall, real: Tensor) -> bool:
    """Whether the model's own numbers of a call are finite, at real tokens."""
    output = call.output[real] if call.output.shape[:2] == real.shape else call.output
    parts = [call.query, call.key, call.value, output]
    if call.weights is not None:
        parts.append(call.weights)
    return all(bool(tensor.isfinite().all()) for tensor in parts)


def _relative_error(output: Tensor, expected: Tensor) -> float:
    """`relative_difference` of the entries that are finite in both; infinite where they are finite in different places."""
    if output.shape != expected.shape:
        return math.inf
    finite = expected.isfinite()
    if not bool((finite == output.isfinite()).all()):
        return math.inf
    return relative_difference(output[finite], expected[finite])


def _why_nothing_was_read(model: nn.Module, refused: dict[str, str]) -> str:
    name = type(model).__name__
    silent = silent_attention(model, set())
    if refused:
        reasons = [f"{module or 'the module itself'} ({reason})" for module, reason in refused.items()]
        return f"none of the attention of {name} can be read: {shortened(reasons)}"
    if not silent:
        return f"{name} has no attention to read; massieu reads transformers such as {READABLE}"
    return (
        f"{name} has modules that are called attention ({shortened(silent)}), but none was seen attending: no scores of "
        "queries and keys went through a softmax to values"
    )


def silent_attention(model: nn.Module, attending: Collection[str]) -> list[str]:
    """Innermost modules that are called attention and were not seen attending."""
    # A scripted module has the name of its class as `original_name`.
    classes = {name: getattr(module, "original_name", type(module).__name__) for name, module in model.named_modules()}
    names = [name for name, class_name in classes.items() if class_name.endswith("Attention")]
    innermost = [name for name in names if not any(other != name and inside(other, name) for other in names)]
    return [
        name or "itself"
        for name in innermost
        if not any(inside(module, name) or inside(name, module) for module in attending)
    ]


def self_check_error(call: AttentionCall, real: Bool[Tensor, "B L"], queries: int = 64) -> float:
    """Largest difference between the model's attention output and ours, relative to the largest output.

    Ours is the textbook formula in float64 on up to two items and ``queries`` evenly spaced queries; padding is left
    out. It catches a wrong scale, mask, bias, cap or sink, and score modifications that this package does not know. Where the
    output's layout is not known, the model's own weights are compared.
    """
    call = call.rows(slice(0, 2))
    length = call.query.shape[2]
    positions = torch.linspace(0, length - 1, min(queries, length), device=call.query.device).long()
    call = call.at(positions)
    scores, weight = explicit_attention(call, torch.float64)
    visible = weight > -torch.inf
    scores = scores + weight
    if call.sink_logits is not None:
        sink = call.sink_logits.double().unsqueeze(-1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    # The sink takes its share of the weight, and stands behind the keys.
    num_keys = call.key.shape[2]
    distribution = torch.softmax(scores, dim=-1)
    weights = distribution[..., :num_keys]
    sink_weight = distribution[..., num_keys:]
    # (B, L): real queries that see a key in every head; without one, ours is NaN and the model's is arbitrary.
    compared = real[:2][:, positions] & visible.any(-1).all(1).expand(call.query.shape[0], -1)
    if call.output.shape[-1]:
        value = call.value.double().repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        if call.no_distribution and call.weights is not None:
            weights = call.weights.double()
        output = weights @ value
        if call.sink_value is not None:
            output = output + sink_weight * call.sink_value.double()
        return relative_difference(call.output.double()[compared], output.transpose(1, 2)[compared])
    if call.weights is None:
        return math.inf  # nothing of the model's to compare with
    return relative_difference(call.weights.double().transpose(1, 2)[compared], weights.transpose(1, 2)[compared])
