"""Do the layers that Bal derives from spin models learn as well as softmax attention? (Bal §3, B11–B16)"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from massieu.experiments.arms import Arms
from massieu.experiments.criterion import Criterion
from massieu.experiments.study import Numbers, experiment
from massieu.experiments.text import Digits
from massieu.experiments.transformer import Block, Transformer
from massieu.nn import Attention, EnergyTransformer, ImplicitHeads, SpinAttention, TAPHeads
from massieu.nn.strategy import Heads

MARGIN = 0.05
_WIDTH, _STEPS = 32, 250
_COST = {"tap": 25.0, "spin": 1.5, "energy": 10.0, "implicit": 25.0}
"""Seconds of a step beside softmax's, about: one thread, float32, an AMD EPYC. At equal time an arm has fewer steps."""


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
        self.inner = EnergyTransformer(width, heads, quantity=10 * width)

    def forward(self, tokens: Float[Tensor, "B L D"], is_causal: bool) -> Float[Tensor, "B L D"]:
        return self.inner(tokens)


def _heads(made: Callable[[], Heads], hidden: int) -> Callable[[int, int], nn.Module]:
    attention = lambda width, heads: Attention(width, heads, batch_first=True, heads=made())  # noqa: E731
    return lambda width, heads: Block(width, heads, attention, hidden=hidden)


_BLOCKS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax": Block,
    "tap": _heads(TAPHeads, 4 * _WIDTH + _WIDTH // 2),  # there are no values to project
    "spin": lambda width, heads: Block(width, heads, _Spins),
    "energy": _Energy,
    "implicit": _heads(lambda: ImplicitHeads(max_lipschitz=0.9), 4 * _WIDTH + _WIDTH // 2),
    "absent": lambda width, heads: Block(width, heads, None),
}


def _arms() -> Arms:
    data = Digits()
    made = {**_BLOCKS, **{f"{name}_at_equal_time": _BLOCKS[name] for name in _COST}}
    models = {
        name: lambda block=block: Transformer(
            data.vocabulary + 1, 16, width=_WIDTH, heads=2, block=block, is_causal=False
        )
        for name, block in made.items()
    }
    steps = dict.fromkeys(_BLOCKS, _STEPS) | {f"{n}_at_equal_time": round(_STEPS / cost) for n, cost in _COST.items()}
    return Arms(data, models, dict.fromkeys(models, 6e-3), steps=steps, masked=True)


def _tune(seed: int, quick: bool) -> Numbers:
    return _arms().tuned(seed, quick)
