"""Does a token answer to others as its weights say, one by one, or collectively? (claims B14, B21, experiment E14)

The response of an output at token i to token j is χ_ij = ‖∂out_i/∂in_j‖, the Frobenius norm, estimated by the gradient of one
random projection of the output: its expected square is χ_ij². It is compared, over the tokens j ≠ i that i sees, with the
heads' mean weights J_ij, and with the response (I − J)⁻¹ of a system whose tokens answer to each other in turn (J has no
diagonal). That is asked of what an attention layer adds, and of the last state with the mean of J from this depth on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu.probing.capture.sites import SiteInfo
from massieu.probing.model.forward import run
from massieu.probing.model.packed import dense_inside
from massieu.probing.statistics.again import FEWEST, AgainGroup, Sums, UnsuitableInputsError, real_alone, watching
from massieu.probing.statistics.layer_groups import has_own_control
from massieu.probing.statistics.registry import BAL, RESPONSE, STATISTICS, Register
from massieu.probing.statistics.windowed import HeadWindow
from massieu.probing.stream.wiring import Step

ASKED = 2
"""Tokens of a window whose response is measured."""
LONGEST = 2048
"""A window longer than that has too large a matrix of weights."""
_ROWS = 64

LOCAL, DEEP = "", "deep_"
"""What a statistic's name begins with: of one layer's output, or of the last state."""
_LINES = "One linear relation is fitted over the tokens that a token sees; a token that all attend to can decide it."


@dataclass(frozen=True, eq=False)
class Response:
    """How one token answers to the other tokens that it sees.

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
_asked = partial(REGISTER.statistic, paper=BAL, scope="layer", control="shuffled_positions", caveat=_LINES)


def explained(outcome: Float[Tensor, " K"], *given: Float[Tensor, " K"]) -> Tensor:
    """R² of a linear regression with a constant; NaN where the outcome is constant, 0 where the given are."""
    centred = outcome - outcome.mean()
    columns = torch.stack([each - each.mean() for each in given], 1)
    sizes = columns.norm(dim=0)
    kept = columns[:, sizes > 0] / sizes[sizes > 0]
    if not kept.shape[1]:
        return centred.square().sum() / centred.square().sum() * 0
    basis, lengths, _ = torch.linalg.svd(kept, full_matrices=False)
    along = basis[:, lengths > 1e-10 * lengths[0]].mT @ centred
    return along.square().sum() / centred.square().sum()


def by_weights(own: Response, compared: Response) -> Tensor:
    """R² of the response on the weights; in the control on ``compared``'s."""
    return explained(own.others, compared.weights)


def collective_gain(own: Response, compared: Response) -> Tensor:
    """What (I − J)⁻¹ adds to the R² of the weights."""
    return explained(own.others, own.weights, compared.collective) - explained(own.others, own.weights)


for _depth, _title, _what in (
    (LOCAL, "", "what an attention layer adds to a token"),
    (DEEP, " of the last state", "a token's last state"),
):
    _asked(
        f"Response{_title} by the weights",
        name=f"{_depth}response_by_weights",
        formula="R² of χ_ij on J_ij over the tokens j ≠ i that i sees",
        claim="E14, B21",
        question=f"How well do the mean attention weights explain the response of {_what} to other tokens?",
    )(by_weights)
    _asked(
        f"Collective response{_title}",
        name=f"{_depth}response_collective_gain",
        formula="R² of χ_ij on J_ij and [(I − J)⁻¹]_ij, less that on J_ij alone",
        claim="E14, B14",
        question="How much more of that response does (I − J)⁻¹ explain, in which tokens influence each other?",
    )(collective_gain)


@_asked(
    "Response to other tokens",
    formula="Σ_{j≠i} χ_ij² / Σ_j χ_ij², of the last state",
    claim="E14, B21",
    control=None,
    caveat="It describes a small change of the state at this depth, not a large one.",
)
def deep_response_to_others(own: Response, compared: Response) -> Tensor:
    """How much of a token's last state's response to the states at this depth comes from other tokens?"""
    del compared
    return own.others.square().sum() / (own.others.square().sum() + own.itself.square())


def responses(
    model: nn.Module, sites: Sequence[SiteInfo], inputs: dict[str, Any], drawn: torch.Generator
) -> dict[int, Sums]:
    """The sums of the statistics at every attention step of the stream.

    Raises:
        UnsuitableInputsError: no attention step was seen, or the window is too long.
    """
    inputs, steps = real_alone(model, inputs), list[Step]()
    last: dict[bool, Tensor] = {}

    def keep(step: Step) -> None:
        if step.after.dim() != 3 or step.after.shape[0] != 1:
            return
        if step.after.shape[1] > LONGEST:
            raise UnsuitableInputsError(f"the response is measured on windows of at most {LONGEST:,} tokens")
        last[step.in_decoder] = step.after
        call = None if step.read is None else step.read.call
        if call is not None and step.sublayer.kind == "attention" and call.key.shape[2] == step.after.shape[1]:
            steps.append(step)

    with _differentiable(model), dense_inside(model), watching(model, sites, keep):
        run(model, {k: v.detach().requires_grad_() if _continuous(v) else v for k, v in inputs.items()})
    if not steps:
        raise UnsuitableInputsError("no attention layer was seen that adds to a stream of the tokens that it reads")
    found: dict[int, Sums] = {}
    for in_decoder in {step.in_decoder for step in steps}:
        stack = [step for step in steps if step.in_decoder == in_decoder]
        found |= _stack_responses(stack, last[in_decoder], drawn)
    return found


def _continuous(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """With gradients, and every weight of the model as a leaf of them; none is given a gradient."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    before = [p.requires_grad for p in parameters]
    try:
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)


def _stack_responses(steps: Sequence[Step], last: Tensor, drawn: torch.Generator) -> dict[int, Sums]:
    """Of one stack of layers whose last state is ``last``."""
    steps = [step for step in steps if step.after.shape == last.shape]
    found: dict[int, Sums] = {}
    if not steps:
        return found
    able = ((_mean_weights(steps[-1]) > 0).sum(1) >= FEWEST).nonzero()[:, 0]
    asked = able[torch.randperm(len(able), generator=drawn)[:ASKED].to(able.device)].tolist()
    along = [torch.randn(last.shape[-1], generator=drawn).to(last) for _ in asked]
    streams = [step.before for step in steps]
    deep = [_gradients(last, token, line, streams) for token, line in zip(asked, along, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for place in range(len(steps) - 1, -1, -1):
        step, sums = steps[place], torch.zeros(2, len(REGISTER.functions), 2, dtype=torch.float64)
        coupling = _mean_weights(step)
        total = total.to(coupling.device) + coupling
        for token, line, whole in zip(asked, along, deep, strict=True):
            (local,) = _gradients(step.after - step.before, token, line, [step.before])
            _add(sums, LOCAL, _response(local, coupling, token), drawn)
            _add(sums, DEEP, _response(whole[place], total / (len(steps) - place), token), drawn)
        found[step.sublayer.index] = sums[0], sums[1]
    return found


def _gradients(
    output: Float[Tensor, "1 L D"], token: int, along: Float[Tensor, " D"], streams: Sequence[Float[Tensor, "1 L D"]]
) -> list[Float[Tensor, "L D"]]:
    """Of one token's output along a direction, with respect to states of the stream, in float64.

    Raises:
        UnsuitableInputsError: it does not depend on one of them.
    """
    product = (output[0, token] * along).sum()
    found = torch.autograd.grad(product, list(streams), retain_graph=True, allow_unused=True)
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        raise UnsuitableInputsError("a layer's output was not computed from the states that were seen before it")
    return [each[0].double() for each in known]


def _mean_weights(step: Step) -> Float[Tensor, "L L"]:
    """The heads' mean weights of every token on every other, without a diagonal, in float64."""
    assert step.read is not None
    call, length = step.read.call, step.after.shape[1]
    everything = torch.ones(length, dtype=torch.bool, device=call.key.device)
    parts = torch.arange(length, device=call.key.device).split(_ROWS)
    with torch.no_grad():
        rows = [HeadWindow(call, everything, part, 0).weights().mean(0).double() for part in parts]
    return torch.cat(rows).fill_diagonal_(0.0)


def _response(gradient: Float[Tensor, "L D"], coupling: Float[Tensor, "L L"], token: int) -> Response:
    strength, visible = gradient.norm(dim=-1), coupling[token] > 0
    within = torch.eye(len(coupling), dtype=torch.float64, device=coupling.device) - coupling
    unit = torch.eye(len(within)).to(within)[token]
    collective, trouble = torch.linalg.solve_ex(within.mT, unit)  # a row of the inverse
    if int(trouble):
        collective = torch.full_like(collective, torch.nan)
    return Response(strength[visible], strength[token], coupling[token][visible], collective[visible])


def _add(sums: Float[Tensor, "2 statistics 2"], prefix: str, own: Response, drawn: torch.Generator) -> None:
    """Add one token's numbers to those of a layer."""
    order = torch.randperm(len(own.others), generator=drawn).to(own.others.device)
    moved = Response(own.others, own.itself, own.weights[order], own.collective[order])
    if len(order) < FEWEST or not bool(own.collective.isfinite().all()):
        return
    for place, (name, measure) in enumerate(REGISTER.functions.items()):
        if name.startswith(DEEP) == (prefix == DEEP):
            for which, compared in enumerate((own, moved)[: 1 + has_own_control(STATISTICS[name])]):
                value = measure(own, compared)
                if bool(value.isfinite()):
                    sums[0, place, which] += value.cpu()
                    sums[1, place, which] += 1


class ResponseGroup(AgainGroup):
    """How tokens' states answer to each other, by gradients."""

    name = RESPONSE
    register = REGISTER
    windows = 8

    def measured(self, inputs: dict[str, Any], drawn: torch.Generator) -> dict[int, Sums]:
        """With gradients of a few tokens' states."""
        return responses(self.model.model, self.model.sites, inputs, drawn)
