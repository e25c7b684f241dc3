"""Does a token respond to others one by one, as its weights say, or collectively? (claims B14, B21, experiment E14)

The response of an output at token i to token j is χ_ij = ‖∂out_i/∂in_j‖, the Frobenius norm. It is estimated by the gradient of
one random projection of the output, whose expected square is χ_ij². Over the tokens j ≠ i that i sees, it is compared with the
heads' mean weights J_ij, and with (I − J)⁻¹, the response of a system whose tokens respond to each other in turn (J has no
diagonal). The output is what an attention layer adds, or the last state, with the mean of J from this depth on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import run
from massieu.probing.model.packed import dense_inside
from massieu.probing.statistics.group import UnsuitableInputsError
from massieu.probing.statistics.layer_groups import has_own_control
from massieu.probing.statistics.registry import BAL, RESPONSE, STATISTICS, Register
from massieu.probing.statistics.rerun import (
    FEWEST,
    ControlledSums,
    RerunGroup,
    watching,
    without_padding,
)
from massieu.probing.statistics.windowed import HeadWindow
from massieu.probing.stream.wiring import Step

RESPONDING_TOKENS = 2
"""Tokens of a window whose response is measured."""
LONGEST = 2048
"""Tokens of a window; the matrix of weights of a longer one would be too large."""
_ROWS = 64
"""Queries whose weights are formed at a time."""

LOCAL = ""
"""Prefix of the names of statistics of one layer's output."""
DEEP = "deep_"
"""Prefix of the names of statistics of the last state."""
_LINES = "One linear relation is fitted over the tokens that a token sees; a token that all attend to can decide it."


@dataclass(frozen=True, eq=False)
class Response:
    """How one token responds to the other tokens that it sees.

    Attributes:
        others: χ_ij for j ≠ i.
        itself: χ_ii.
        weights: J_ij.
        collective: [(I − J)⁻¹]_ij.
    """

    others: Float[Tensor, " K"]
    itself: Float[Tensor, ""]
    weights: Float[Tensor, " K"]
    collective: Float[Tensor, " K"]


REGISTER = Register[Callable[[Response, Response], Tensor]](RESPONSE)
_of_response = partial(REGISTER.statistic, paper=BAL, scope="layer", control="shuffled_positions", caveat=_LINES)


def explained(outcome: Float[Tensor, " K"], *predictors: Float[Tensor, " K"]) -> Tensor:
    """R² of a linear regression with a constant; NaN if the outcome is constant, 0 if all predictors are."""
    centred = outcome - outcome.mean()
    columns = torch.stack([predictor - predictor.mean() for predictor in predictors], 1)
    # Columns of equal length, so that the threshold below sees how parallel they are, and not their units.
    lengths = columns.norm(dim=0)
    columns = columns[:, lengths > 0] / lengths[lengths > 0]
    if not columns.shape[1]:
        return centred.square().sum() / centred.square().sum() * 0
    basis, singular_values, _ = torch.linalg.svd(columns, full_matrices=False)
    projected = basis[:, singular_values > 1e-10 * singular_values[0]].mT @ centred
    return projected.square().sum() / centred.square().sum()


def by_weights(response: Response, compared: Response) -> Tensor:
    """R² of the response on the weights; in the control on ``compared``'s."""
    return explained(response.others, compared.weights)


def collective_gain(response: Response, compared: Response) -> Tensor:
    """What (I − J)⁻¹ adds to the R² of the weights; in the control ``compared``'s."""
    with_collective = explained(response.others, response.weights, compared.collective)
    return with_collective - explained(response.others, response.weights)


def _register_regressions(prefix: str, title: str, output: str) -> None:
    """Register both regressions for one output: a layer's, or the last state."""
    _of_response(
        f"Response{title} by the weights",
        name=f"{prefix}response_by_weights",
        formula="R² of χ_ij on J_ij over the tokens j ≠ i that i sees",
        claim="E14, B21",
        question=f"How well do the mean attention weights explain the response of {output} to other tokens?",
    )(by_weights)
    _of_response(
        f"Collective response{title}",
        name=f"{prefix}response_collective_gain",
        formula="R² of χ_ij on J_ij and [(I − J)⁻¹]_ij, less that on J_ij alone",
        claim="E14, B14",
        question="How much more of that response does (I − J)⁻¹ explain, in which tokens influence each other?",
    )(collective_gain)


_register_regressions(LOCAL, "", "what an attention layer adds to a token")
_register_regressions(DEEP, " of the last state", "a token's last state")


@_of_response(
    "Response to other tokens",
    formula="Σ_{j≠i} χ_ij² / Σ_j χ_ij², of the last state",
    claim="E14, B21",
    control=None,
    caveat="It describes a small change of the state at this depth, not a large one.",
)
def deep_response_to_others(response: Response, compared: Response) -> Tensor:
    """How much of a token's last state's response to the states at this depth comes from other tokens?"""
    del compared
    return response.others.square().sum() / (response.others.square().sum() + response.itself.square())


def responses(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], drawn: torch.Generator
) -> dict[int, ControlledSums]:
    """The sums of the statistics at every attention step of the stream.

    Raises:
        UnsuitableInputsError: no attention step was seen, or the window is too long.
    """
    inputs = without_padding(model, inputs)
    steps: list[Step] = []
    last_states: dict[bool, Tensor] = {}  # of the encoder and of the decoder

    def collect(step: Step) -> None:
        if step.after.dim() != 3 or step.after.shape[0] != 1:
            return
        if step.after.shape[1] > LONGEST:
            raise UnsuitableInputsError(f"the response is measured on windows of at most {LONGEST:,} tokens")
        last_states[step.in_decoder] = step.after
        call = None if step.read is None else step.read.call
        if call is not None and step.sublayer.kind == "attention" and call.key.shape[2] == step.after.shape[1]:
            steps.append(step)

    with _differentiable(model), dense_inside(model), watching(model, sites, collect):
        run(model, {name: _as_leaf(value) for name, value in inputs.items()})
    if not steps:
        raise UnsuitableInputsError("no attention layer was seen that adds to a stream of the tokens that it reads")
    sums: dict[int, ControlledSums] = {}
    for in_decoder in {step.in_decoder for step in steps}:
        stack = [step for step in steps if step.in_decoder == in_decoder]
        sums |= _stack_responses(stack, last_states[in_decoder], drawn)
    return sums


def _as_leaf(value: Any) -> Any:
    """An input of the model; a continuous one as a leaf that gradients reach."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """With gradients enabled, and every weight of the model a leaf; no weight's `grad` is written.

    Without a leaf before it, a state that frozen weights compute from token ids would have no gradient.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    before = [parameter.requires_grad for parameter in parameters]
    try:
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)


def _stack_responses(steps: Sequence[Step], last: Tensor, drawn: torch.Generator) -> dict[int, ControlledSums]:
    """The sums of one stack of layers whose last state is ``last``."""
    steps = [step for step in steps if step.after.shape == last.shape]
    sums_of_layers: dict[int, ControlledSums] = {}
    if not steps:
        return sums_of_layers
    # A few tokens that see enough others, and for each a random direction on which its output is projected.
    candidates = ((_mean_weights(steps[-1]) > 0).sum(1) >= FEWEST).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=drawn)[:RESPONDING_TOKENS]
    tokens = candidates[order.to(candidates.device)].tolist()
    directions = [torch.randn(last.shape[-1], generator=drawn).to(last) for _ in tokens]
    streams = [step.before for step in steps]
    deep_gradients = [
        _gradients(last, token, direction, streams) for token, direction in zip(tokens, directions, strict=True)
    ]
    # From the last layer backwards, so that one running sum gives the mean of J from each depth on.
    coupling_sum = torch.zeros((), dtype=torch.float64)
    for place in range(len(steps) - 1, -1, -1):
        step = steps[place]
        sums = torch.zeros(2, len(REGISTER.functions), 2, dtype=torch.float64)
        coupling = _mean_weights(step)
        coupling_sum = coupling_sum.to(coupling.device) + coupling
        for token, direction, to_last in zip(tokens, directions, deep_gradients, strict=True):
            (local,) = _gradients(step.after - step.before, token, direction, [step.before])
            _add(sums, LOCAL, _response(local, coupling, token), drawn)
            _add(sums, DEEP, _response(to_last[place], coupling_sum / (len(steps) - place), token), drawn)
        sums_of_layers[step.sublayer.index] = sums[0], sums[1]
    return sums_of_layers


def _gradients(
    output: Float[Tensor, "1 L D"],
    token: int,
    direction: Float[Tensor, " D"],
    streams: Sequence[Float[Tensor, "1 L D"]],
) -> list[Float[Tensor, "L D"]]:
    """Gradients of one token's output along a direction with respect to states of the stream, in float64.

    Raises:
        UnsuitableInputsError: the output does not depend on one of the states.
    """
    product = (output[0, token] * direction).sum()
    gradients = torch.autograd.grad(product, list(streams), retain_graph=True, allow_unused=True)
    if any(gradient is None for gradient in gradients):
        raise UnsuitableInputsError("a layer's output was not computed from the states that were seen before it")
    return [gradient[0].double() for gradient in gradients]


def _mean_weights(step: Step) -> Float[Tensor, "L L"]:
    """The heads' mean weights of every token on every other, without a diagonal, in float64."""
    assert step.read is not None
    call = step.read.call
    length = step.after.shape[1]
    all_keys = torch.ones(length, dtype=torch.bool, device=call.key.device)
    parts = torch.arange(length, device=call.key.device).split(_ROWS)
    with torch.no_grad():
        rows = [HeadWindow(call, all_keys, part, 0).weights().mean(0).double() for part in parts]
    return torch.cat(rows).fill_diagonal_(0.0)


def _response(gradient: Float[Tensor, "L D"], coupling: Float[Tensor, "L L"], token: int) -> Response:
    """The response of one token, from the gradient of its projected output."""
    strength = gradient.norm(dim=-1)
    visible = coupling[token] > 0
    matrix = torch.eye(len(coupling), dtype=torch.float64, device=coupling.device) - coupling
    unit = torch.eye(len(matrix)).to(matrix)[token]
    # One row of the inverse: x (I − J) = e_token is (I − J)ᵀ x = e_token.
    collective, singular = torch.linalg.solve_ex(matrix.mT, unit)
    if int(singular):
        collective = torch.full_like(collective, torch.nan)
    return Response(strength[visible], strength[token], coupling[token][visible], collective[visible])


def _add(sums: Float[Tensor, "2 statistics 2"], prefix: str, response: Response, drawn: torch.Generator) -> None:
    """Add one token's numbers to those of a layer, and those of the control, whose couplings are of shuffled tokens."""
    order = torch.randperm(len(response.others), generator=drawn).to(response.others.device)
    shuffled = replace(response, weights=response.weights[order], collective=response.collective[order])
    if len(order) < FEWEST or not bool(response.collective.isfinite().all()):
        return
    for place, (name, measure) in enumerate(REGISTER.functions.items()):
        if name.startswith(DEEP) != (prefix == DEEP):
            continue
        compared = [response, shuffled] if has_own_control(STATISTICS[name]) else [response]
        for side, couplings in enumerate(compared):
            value = measure(response, couplings)
            if bool(value.isfinite()):
                sums[0, place, side] += value.cpu()
                sums[1, place, side] += 1


class ResponseGroup(RerunGroup):
    """How tokens' states respond to each other, by gradients."""

    name = RESPONSE
    register = REGISTER
    windows = 8

    def measured(self, inputs: dict[str, Any], drawn: torch.Generator) -> dict[int, ControlledSums]:
        """The sums from gradients of a few tokens' states."""
        return responses(self.model.model, self.model.sites, inputs, drawn)
