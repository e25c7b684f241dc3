"""Steps of a head towards the fixed point of its energy: what each is worth. (E13, B12)"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from massieu import ops
from massieu.papers.experiments.arms import Arms, masked_loss
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock
from massieu.solve import ConjugateGradients, Implicit, fixed_point

_LENGTH, _WIDTH, _TRAINED = 16, 32, 200
_ALPHA, _LIPSCHITZ = 0.5, 0.9
_UNROLLED = (1, 2, 4, 8)


class PulledAttention(nn.Module):
    """Heads that go so many steps of z ↦ (1 − α)·query + α·(attention of z to the keys), or to the fixed point (B12).

    Keys are drawn in to a ball in which a step contracts by 0.9; they are the values.

    Attributes:
        steps: None: to the fixed point, with its derivative.
        iterations: That the last call took, on average over queries.
    """

    def __init__(self, width: int, heads: int, steps: int | None) -> None:
        super().__init__()
        self.heads, self.steps, self.iterations = heads, steps, float(steps or 0)
        self.query, self.key, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(
        self, query: Float[Tensor, "B L D"], key: Tensor, value: Tensor, **_: bool
    ) -> tuple[Float[Tensor, "B L D"], None]:
        asked, keys = (
            made(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made, tokens in ((self.query, query), (self.key, key))
        )
        excess = keys.square().sum(-1, keepdim=True) * (_ALPHA * keys.shape[-1] ** -0.5 / _LIPSCHITZ)
        keys = keys / excess.clamp_min(1.0).sqrt()
        if self.steps is None:
            found = fixed_point(
                _step,
                asked,
                (asked, keys),
                item_dims=1,
                throw=False,
                adjoint=Implicit(ConjugateGradients(), lost="zero"),
            )
            state, self.iterations = found.value, float(found.steps.double().mean())
        else:
            state = asked
            for _number in range(self.steps):
                state = _step(state, asked, keys)
        return self.out(state.transpose(1, 2).flatten(2)), None


def _step(state: Tensor, asked: Tensor, keys: Tensor) -> Tensor:
    return asked + _ALPHA * (ops.attention(state, keys, keys).output - asked)


_ARMS: dict[str, int | None] = {**{f"{steps}_steps": steps for steps in _UNROLLED}, "fixed_point": None}


def _model(vocabulary: int, steps: int | None) -> Transformer:
    def block(width: int, heads: int) -> TransformerBlock:
        return TransformerBlock(width, heads, lambda size, number: PulledAttention(size, number, steps))

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
    models = {name: lambda steps=steps: _model(text.vocabulary + 1, steps) for name, steps in _ARMS.items()}
    arms = Arms(text, models, dict.fromkeys(models, 1.2e-2), steps=_TRAINED, contexts=64, masked=True)
    found = arms.losses(seed, quick)
    trained = found["fixed_point"][1]
    tokens = text.test(seed)[:256]
    exact, last = _gradient(trained, tokens, text.vocabulary, None)
    numbers = {f"{name}_loss": loss for name, (loss, _) in found.items()}
    for steps in _UNROLLED:
        cut, loss = _gradient(trained, tokens, text.vocabulary, steps)
        numbers[f"gradient_bias_{steps}"] = float((cut - exact).norm() / exact.norm())
        numbers[f"cut_to_{steps}_loss"] = loss
    _gradient(trained, tokens, text.vocabulary, None)
    return numbers | {"uncut_loss": last, "iterations": _attentions(trained)[-1].iterations}


def _attentions(model: nn.Module) -> list[PulledAttention]:
    return [module for module in model.modules() if isinstance(module, PulledAttention)]


def _gradient(model: nn.Module, tokens: Tensor, mask: int, steps: int | None) -> tuple[Tensor, float]:
    """Of all weights, and the loss, with so many steps."""
    for attention in _attentions(model):
        attention.steps = steps
    loss = masked_loss(model, tokens, torch.Generator().manual_seed(0), mask)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]).double(), float(loss.detach())
