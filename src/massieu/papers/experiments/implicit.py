"""The steps of a head towards the fixed point of its energy: the worth of each. (E13, B12)"""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from massieu import ops
from massieu.papers.experiments.arms import Arms, masked_loss
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock
from massieu.solve import ConjugateGradients, Implicit, fixed_point

_LENGTH = 16
_WIDTH = 32
_TRAINING_STEPS = 200
_ALPHA = 0.5
_LIPSCHITZ = 0.9
_UNROLLED = (1, 2, 4, 8)
"""The numbers of steps of the arms that do not iterate to the fixed point."""


class PulledAttention(nn.Module):
    """Heads that take K steps of z ↦ (1 − α)·query + α·(attention of z to the keys), or go to the fixed point (B12).

    Keys are the values. Those outside a ball are scaled to its edge; inside it a step contracts by 0.9.

    Attributes:
        steps: K; None for the fixed point, with its derivative.
        iterations: The steps that the last call took, on average over queries.
    """

    def __init__(self, width: int, heads: int, steps: int | None) -> None:
        super().__init__()
        self.heads = heads
        self.steps = steps
        self.iterations = float(steps or 0)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, query: Float[Tensor, "B L D"], key: Tensor, value: Tensor, **_: bool
    ) -> tuple[Float[Tensor, "B L D"], None]:
        queries = self._split_heads(self.query(query))
        keys = self._split_heads(self.key(key))
        # A step's Lipschitz constant is at most α·scale·(largest ‖key‖)².
        excess = keys.square().sum(-1, keepdim=True) * (_ALPHA * keys.shape[-1] ** -0.5 / _LIPSCHITZ)
        keys = keys / excess.clamp_min(1.0).sqrt()
        if self.steps is None:
            solution = fixed_point(
                _step,
                queries,
                (queries, keys),
                item_dims=1,
                throw=False,
                adjoint=Implicit(ConjugateGradients(), lost="zero"),
            )
            state = solution.value
            self.iterations = float(solution.steps.double().mean())
        else:
            state = queries
            for _number in range(self.steps):
                state = _step(state, queries, keys)
        return self.out(state.transpose(1, 2).flatten(2)), None  # heads joined: (B, L, D)

    def _split_heads(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B H L d"]:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _step(state: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return queries + _ALPHA * (ops.attention(state, keys, keys).output - queries)


_ARMS: dict[str, int | None] = {**{f"{steps}_steps": steps for steps in _UNROLLED}, "fixed_point": None}
"""The number of steps of each arm."""


def _model(vocabulary: int, steps: int | None) -> Transformer:
    block = partial(TransformerBlock, attention=partial(PulledAttention, steps=steps))
    return Transformer(vocabulary, _LENGTH, width=_WIDTH, heads=2, block=block, is_causal=False)


@experiment(
    "implicit",
    question="How many steps towards its fixed point does a head need for its loss and for its gradient?",
    claims="E13, B12",
    minutes=6,
    criteria=[
        *described({f"{name}_loss": f"loss trained with {name.replace('_', ' ')}, nats" for name in _ARMS}),
        *described(
            {f"cut_to_{n}_loss": f"loss trained to the fixed point, evaluated with {n} steps" for n in _UNROLLED}
        ),
        *described({f"gradient_bias_{n}": f"‖gradient of {n} steps − implicit‖/‖implicit‖" for n in _UNROLLED}),
        *described({"iterations": "steps to the fixed point, mean over queries of the last layer, after training"}),
    ],
)
def implicit(seed: int, quick: bool) -> Numbers:
    """A transformer of two layers, 2 heads and width 32 fills in a quarter of the characters in windows of 16 of the reference
    text that ships with Python. It trains for 200 steps of 64 windows with the step size 0.012. From the query q, its heads
    take K steps of z ↦ (q + Σ p(z)·k)/2, or iterate to the fixed point, with the gradient of the implicit function theorem.
    Keys are kept in a ball in which a step contracts by the factor 0.9. All arms have equally many weights. Gradients are
    compared on held-out windows, at the weights of the last arm. A forward pass costs as many attentions as it has steps.
    The seconds of a seed include all arms.
    """
    text = ReferenceText(_LENGTH - 1)
    mask = text.vocabulary
    models = {name: partial(_model, text.vocabulary + 1, steps) for name, steps in _ARMS.items()}
    arms = Arms(text, models, dict.fromkeys(models, 1.2e-2), steps=_TRAINING_STEPS, contexts=64, masked=True)
    trained = arms.train(seed, quick)
    model = trained["fixed_point"].model
    tokens = text.test(seed)[:256]
    numbers = {f"{name}_loss": arm.loss for name, arm in trained.items()}
    exact = _loss_and_gradient(model, tokens, mask, steps=None)
    iterations = _attentions(model)[-1].iterations
    for steps in _UNROLLED:
        unrolled = _loss_and_gradient(model, tokens, mask, steps)
        numbers[f"gradient_bias_{steps}"] = float((unrolled.gradient - exact.gradient).norm() / exact.gradient.norm())
        numbers[f"cut_to_{steps}_loss"] = unrolled.loss
    return numbers | {"uncut_loss": exact.loss, "iterations": iterations}


def _attentions(model: nn.Module) -> list[PulledAttention]:
    return [module for module in model.modules() if isinstance(module, PulledAttention)]


class _LossAndGradient(NamedTuple):
    loss: float
    gradient: Float64[Tensor, " P"]


def _loss_and_gradient(model: nn.Module, tokens: Tensor, mask: int, steps: int | None) -> _LossAndGradient:
    """The masked loss with this number of steps in every head, and its gradient in all weights."""
    for attention in _attentions(model):
        attention.steps = steps
    loss = masked_loss(model, tokens, torch.Generator().manual_seed(0), mask)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    gradient = torch.cat([part.flatten() for part in gradients]).double()
    return _LossAndGradient(float(loss.detach()), gradient)
