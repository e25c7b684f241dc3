"""The energy that heads give to a text while they are trained. (Bal §1, B1, S3)"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from massieu import ops
from massieu.papers.experiments.conservative import TiedAttention, tied_block
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import mean_loss
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.training import minimise
from massieu.papers.experiments.transformer import Transformer

_LENGTH = 64
_WIDTH = 48
_READ_STEPS = (0, 50, 200, 800)
"""The steps of training before which energies are read; training has as many as the last."""
_ARMS = {"untied": "untied", "all": "tied"}
"""The title of each tie."""


@experiment(
    "landscape",
    question="How do the energies of a text change in training, and do they differ from those of shuffled characters?",
    claims="B1, S3",
    minutes=4,
    criteria=described(
        {
            f"{tie}_{quantity}_{step}": f"{title} after {step} steps, {tie_title}"
            for tie, tie_title in _ARMS.items()
            for quantity, title in (
                ("energy", "energy per token, nats,"),
                ("apart", "energy of shuffled characters − energy of the text"),
            )
            for step in _READ_STEPS
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
    steps = 4 if quick else _READ_STEPS[-1]
    numbers: Numbers = {}
    for tie in _ARMS:
        for step, reading in _energies_in_training(text, tie, seed, steps, tokens, shuffled).items():
            numbers[f"{tie}_energy_{step}"] = reading.energy
            numbers[f"{tie}_apart_{step}"] = reading.energy_of_shuffled - reading.energy
    return numbers


class _Reading(NamedTuple):
    energy: float
    energy_of_shuffled: float


def _energies_in_training(
    text: ReferenceText, tie: str, seed: int, steps: int, tokens: Tensor, shuffled: Tensor
) -> dict[int, _Reading]:
    """Energies before each step of `_READ_STEPS`; after training for those that it does not reach."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(text.vocabulary, _LENGTH, width=_WIDTH, block=tied_block(tie))
    readings: dict[int, _Reading] = {}
    step_numbers = iter(range(steps))

    def read() -> _Reading:
        return _Reading(energy(model, tokens), energy(model, shuffled))

    def loss() -> Tensor:
        step = next(step_numbers)
        if step in _READ_STEPS:
            readings[step] = read()
        return mean_loss(model, text.judged, text.sample(32, generator))

    minimise(loss, list(model.parameters()), steps=steps, step_size=1.2e-2)
    for step in _READ_STEPS:
        if step >= steps:
            readings[step] = read()
    return readings


def energy(model: nn.Module, tokens: Tensor) -> float:
    """−log mean exp(score) over visible keys, mean over tokens, heads and layers."""
    log_means: list[Tensor] = []

    def read_log_mean(attention: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        assert isinstance(attention, TiedAttention)  # No other module has this hook.
        queries, keys = attention.queries_and_keys(inputs[0])
        log_partition = ops.attention(queries, keys, keys, is_causal=True).log_partition
        num_visible = torch.arange(1, keys.shape[-2] + 1)
        log_means.append(log_partition - num_visible.log())

    layers = [module for module in model.modules() if isinstance(module, TiedAttention)]
    hooks = [layer.register_forward_hook(read_log_mean) for layer in layers]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return -float(torch.stack([layer.double().mean() for layer in log_means]).mean())
