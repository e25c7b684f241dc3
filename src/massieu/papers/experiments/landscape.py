"""The energy that heads give to a text while they are trained. (Bal §1, B1, S3)"""

import torch
from torch import Tensor, nn

from massieu import ops
from massieu.papers.experiments.conservative import TiedAttention
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import mean_loss
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.training import minimise
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

_LENGTH, _WIDTH = 64, 48
_AT = (0, 50, 200, 800)
_ARMS = {"untied": "untied", "all": "tied"}


@experiment(
    "landscape",
    question="How do the energies of a text change in training, and do they differ from those of shuffled characters?",
    claims="B1, S3",
    minutes=4,
    criteria=described(
        {
            f"{arm}_{part}_{step}": f"{title} after {step} steps, {word}"
            for arm, word in _ARMS.items()
            for part, title in (
                ("energy", "energy per token, nats,"),
                ("apart", "energy of shuffled characters − energy of the text"),
            )
            for step in _AT
        }
    ),
)
def landscape(seed: int, quick: bool) -> Numbers:
    """A causal transformer of two layers and width 48 predicts the next character of the reference text that ships with
    Python, from windows of 64, in 800 steps of 32 windows of step size 0.012. The energy of a token in a head is −log
    of the mean of exp(score) over the visible keys; it is 0 for a query of 0. It is read on 64 held-out windows and on
    the same with their characters shuffled, as a mean over tokens, heads and layers. Tied heads are those of the
    experiment conservative whose write is the gradient of their log Z. A raw energy depends on the origin of the keys;
    attention does not.
    """
    text = ReferenceText(_LENGTH)
    tokens = text.test(seed)[:64, :-1]
    order = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    shuffled = tokens.gather(1, order)
    found: Numbers = {}
    for arm in _ARMS:
        read = _during(text, arm, seed, 4 if quick else _AT[-1], tokens, shuffled)
        found |= {f"{arm}_{part}_{step}": value for step, parts in read.items() for part, value in parts.items()}
    return found


def _during(
    text: ReferenceText, arm: str, seed: int, steps: int, tokens: Tensor, shuffled: Tensor
) -> dict[int, Numbers]:
    """Energies at each step of `_AT`; at the end of training for those that it does not come to."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = lambda width, heads: TransformerBlock(width, heads, lambda size, _: TiedAttention(size, arm))  # noqa: E731
        model = Transformer(text.vocabulary, _LENGTH, width=_WIDTH, block=block)
    read: dict[int, Numbers] = {}
    done = iter(range(steps))

    def note(step: int) -> None:
        own = energy(model, tokens)
        read[step] = {"energy": own, "apart": energy(model, shuffled) - own}

    def loss() -> Tensor:
        step = next(done)
        if step in _AT:
            note(step)
        return mean_loss(model, text.judged, text.sample(32, drawn))

    minimise(loss, list(model.parameters()), steps=steps, step_size=1.2e-2)
    for step in _AT:
        if step >= steps:
            note(step)
    return read


def energy(model: nn.Module, tokens: Tensor) -> float:
    """−log mean exp(score) over visible keys, mean over tokens, heads and layers."""
    read: list[Tensor] = []

    def keep(attention: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if isinstance(attention, TiedAttention):
            asked, keys = attention.asked_and_keys(inputs[0])
            log_partition = ops.attention(asked, keys, keys, is_causal=True).log_partition
            read.append(log_partition - torch.arange(1, keys.shape[-2] + 1).log())

    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, TiedAttention)]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return -float(torch.stack([part.double().mean() for part in read]).mean())
