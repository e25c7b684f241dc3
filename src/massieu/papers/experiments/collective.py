"""Do the layers that Bal derives from spin models learn as well as softmax attention? (Bal §3, B11–B16)"""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from massieu.nn import Attention, EnergyTransformer, ImplicitHeads, SpinAttention, TAPHeads
from massieu.nn.strategy import Heads
from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import MakeBlock, Transformer, TransformerBlock

MARGIN = 0.05
_LENGTH = 16
_WIDTH = 32
_STEPS = 300
_COST = {"tap": 33.0, "spin": 1.25, "energy": 14.0, "implicit": 25.0}
"""Time of a step in units of softmax's: one thread, float32, an AMD EPYC. At equal time an arm has fewer steps."""
_TITLES = {
    "tap": "TAP heads",
    "spin": "vector spins",
    "energy": "the Energy Transformer",
    "implicit": "implicit heads",
}


class _SpinHeads(nn.Module):
    """`SpinAttention` with the arguments of `massieu.nn.Attention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.spins = SpinAttention(width, heads)

    def forward(self, query: Float[Tensor, "B L D"], key: Tensor, value: Tensor, **_: bool) -> tuple[Tensor, None]:
        return self.spins(query), None


class _EnergyBlock(nn.Module):
    """A whole block: the memories of the Energy Transformer are its feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.energy_transformer = EnergyTransformer(width, heads, num_memories=10 * width + 12)

    def forward(self, tokens: Float[Tensor, "B L D"], is_causal: bool) -> Float[Tensor, "B L D"]:
        return self.energy_transformer(tokens)


def _block_with(make_heads: Callable[[], Heads], hidden: int) -> MakeBlock:
    def attention(width: int, heads: int) -> Attention:
        return Attention(width, heads, batch_first=True, heads=make_heads())

    return partial(TransformerBlock, attention=attention, hidden=hidden)


_BLOCKS: dict[str, MakeBlock] = {
    "softmax": TransformerBlock,
    "tap": _block_with(TAPHeads, 4 * _WIDTH),
    "spin": partial(TransformerBlock, attention=_SpinHeads),
    "energy": _EnergyBlock,
    # Implicit heads have fewer weights, which the feed-forward network makes up for.
    "implicit": _block_with(partial(ImplicitHeads, max_lipschitz=0.9), 4 * _WIDTH + _WIDTH // 2),
    "absent": partial(TransformerBlock, attention=None),
}


def _arms() -> Arms:
    data = ReferenceText(_LENGTH - 1)  # windows of 16
    blocks = dict(_BLOCKS)
    steps = dict.fromkeys(_BLOCKS, _STEPS)
    for name, cost in _COST.items():
        blocks[f"{name}_at_equal_time"] = _BLOCKS[name]
        steps[f"{name}_at_equal_time"] = round(_STEPS / cost)
    models = {
        # One token more than the alphabet: the mask.
        name: partial(Transformer, data.vocabulary + 1, _LENGTH, width=_WIDTH, heads=2, block=block, is_causal=False)
        for name, block in blocks.items()
    }
    step_sizes = dict.fromkeys(models, 1.2e-2) | dict.fromkeys(("tap", "energy", "implicit"), 6e-3)
    return Arms(data, models, step_sizes, steps=steps, contexts=64, masked=True)


def _tune(seed: int, quick: bool) -> Numbers:
    return _arms().tune(seed, quick)


@experiment(
    "collective",
    question="Do layers made from spin models learn as well as softmax attention does, to within 0.05 nats?",
    claims="B11, B12, B14, B16, E12, E13",
    minutes=18,
    tune=_tune,
    criteria=[
        *(
            Criterion(
                f"{name}_cost", f"loss with {title} − loss with softmax, nats, equal weights and steps", most=MARGIN
            )
            for name, title in _TITLES.items()
        ),
        *(
            Criterion(
                f"{name}_at_equal_time_cost", f"loss with {title} − loss with softmax, at equal time", most=MARGIN
            )
            for name, title in _TITLES.items()
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
    losses = _arms().losses(seed, quick)
    return {
        **{f"{name}_loss": loss for name, loss in losses.items()},
        **{f"{name}_cost": loss - losses["softmax"] for name, loss in losses.items() if name != "softmax"},
        "softmax_over_absent": losses["softmax"] - losses["absent"],
    }
