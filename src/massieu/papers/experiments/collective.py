"""Do the layers that Bal derives from spin models learn as well as softmax attention? (Bal §3, B11–B16)"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from massieu.nn import Attention, EnergyTransformer, ImplicitHeads, SpinAttention, TAPHeads
from massieu.nn.strategy import Heads
from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

MARGIN = 0.05
_LENGTH, _WIDTH, _STEPS = 16, 32, 300
_COST = {"tap": 33.0, "spin": 1.25, "energy": 14.0, "implicit": 25.0}
"""Seconds of a step beside softmax's, about: one thread, float32, an AMD EPYC. At equal time an arm has fewer steps."""


_WORDS = {
    "tap": "TAP heads",
    "spin": "vector spins",
    "energy": "the Energy Transformer",
    "implicit": "implicit heads",
}


class _Spins(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.spins = SpinAttention(width, heads)

    def forward(self, query: Float[Tensor, "B L D"], key: Tensor, value: Tensor, **_: bool) -> tuple[Tensor, None]:
        return self.spins(query), None


class _Energy(nn.Module):
    """A whole block: its memories are the feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.inner = EnergyTransformer(width, heads, num_memories=10 * width + 12)

    def forward(self, tokens: Float[Tensor, "B L D"], is_causal: bool) -> Float[Tensor, "B L D"]:
        return self.inner(tokens)


def _heads(made: Callable[[], Heads], hidden: int) -> Callable[[int, int], nn.Module]:
    attention = lambda width, heads: Attention(width, heads, batch_first=True, heads=made())  # noqa: E731
    return lambda width, heads: TransformerBlock(width, heads, attention, hidden=hidden)


_BLOCKS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax": TransformerBlock,
    "tap": _heads(TAPHeads, 4 * _WIDTH),
    "spin": lambda width, heads: TransformerBlock(width, heads, _Spins),
    "energy": _Energy,
    "implicit": _heads(lambda: ImplicitHeads(max_lipschitz=0.9), 4 * _WIDTH + _WIDTH // 2),
    "absent": lambda width, heads: TransformerBlock(width, heads, None),
}


def _arms() -> Arms:
    data = ReferenceText(_LENGTH - 1)  # windows of 16
    made = {**_BLOCKS, **{f"{name}_at_equal_time": _BLOCKS[name] for name in _COST}}
    models = {
        name: lambda block=block: Transformer(
            data.vocabulary + 1, _LENGTH, width=_WIDTH, heads=2, block=block, is_causal=False
        )
        for name, block in made.items()
    }
    steps = dict.fromkeys(_BLOCKS, _STEPS) | {f"{n}_at_equal_time": round(_STEPS / cost) for n, cost in _COST.items()}
    sizes = dict.fromkeys(models, 1.2e-2) | dict.fromkeys(("tap", "energy", "implicit"), 6e-3)
    return Arms(data, models, sizes, steps=steps, contexts=64, masked=True)


def _tune(seed: int, quick: bool) -> Numbers:
    return _arms().tuned(seed, quick)


@experiment(
    "collective",
    question="Do layers made from spin models learn as well as softmax attention does, to within 0.05 nats?",
    claims="B11, B12, B14, B16, E12, E13",
    minutes=18,
    tune=_tune,
    criteria=[
        *(
            Criterion(
                f"{name}_cost", f"loss with {words} − loss with softmax, nats, equal weights and steps", most=MARGIN
            )
            for name, words in _WORDS.items()
        ),
        *(
            Criterion(
                f"{name}_at_equal_time_cost", f"loss with {words} − loss with softmax, at equal time", most=MARGIN
            )
            for name, words in _WORDS.items()
        ),
        Criterion("softmax_over_absent", "loss with softmax − loss without attention", most=-0.2, role="optimisation"),
        Criterion("absent_cost", "loss without attention − loss with softmax", most=MARGIN, role="control"),
    ],
)
def collective(seed: int, quick: bool) -> Numbers:
    """A transformer of two layers, 2 heads and width 32 fills in a quarter of the characters in windows of 16 of the reference
    text that ships with Python, after 300 steps of 64 windows. Each arm replaces the softmax heads: by TAP heads, vector
    spins, the Energy Transformer's block or implicit heads. All have 32,744 weights, to within a thousandth. At equal time
    an arm takes as many steps as fit into the time of the softmax arm. The cost of a step was measured once, on one thread
    of an AMD EPYC in float32: 33, 1.25, 14 and 25 times that of softmax. Each arm has the step size that was best for it on
    seed 0.
    """
    losses = {name: loss for name, (loss, _) in _arms().losses(seed, quick).items()}
    return {
        **{f"{name}_loss": loss for name, loss in losses.items()},
        **{f"{name}_cost": losses[name] - losses["softmax"] for name in losses if name != "softmax"},
        "softmax_over_absent": losses["softmax"] - losses["absent"],
    }
