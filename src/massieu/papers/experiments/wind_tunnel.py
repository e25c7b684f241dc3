"""Do small transformers compute exact posteriors where a network without attention cannot? (arXiv 2512.22471, Z2)"""

from dataclasses import dataclass

import torch

from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.processes import Placed, share
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import BIT, Bijection, Chain, SequenceTask, divergence, train
from massieu.papers.experiments.transformer import Transformer, TransformerBlock


@dataclass(frozen=True)
class _Sizes:
    """Of the tasks, the models, and their training: for the bijection, for the chain."""

    pairs: int
    states: int
    symbols: int
    length: int
    width: int
    heads: int
    depths: tuple[int, int]
    contexts: tuple[int, int]
    steps: tuple[int, int]
    step_sizes: tuple[float, float]


_DEFAULT = _Sizes(8, 4, 5, 24, 32, 4, (1, 2), (256, 128), (6000, 4000), (1.5e-2, 1e-2))
_LARGE = _Sizes(20, 5, 5, 48, 192, 6, (6, 6), (256, 256), (50_000, 50_000), (1e-3, 1e-3))


def _large(seed: int, quick: bool) -> Numbers:
    return _measured(seed, quick, _LARGE)


@experiment(
    "wind-tunnel",
    question="Do small transformers predict as the exact posterior does, to a thousandth of a bit, where attention is needed?",
    claims="Z2, E16; Agarwal et al., arXiv 2512.22471",
    minutes=18,
    large=_large,
    criteria=[
        Criterion("bijection", "KL(exact ‖ model) of a bijection's next value, bits", most=1e-3),
        Criterion("chain", "KL(exact ‖ model) of a hidden Markov chain's next symbol, bits", most=1e-3),
        Criterion("bijection_ratio", "bijection: KL without attention / KL with attention", least=100),
        Criterion("chain_ratio", "chain: KL without attention / KL with attention", least=100),
        Criterion("excess_risk", "larger of the two KL(exact ‖ model), nats", most=1e-2, role="optimisation"),
        Criterion("bijection_without", "bijection: KL without attention, bits", most=1e-3, role="control"),
        Criterion("chain_without", "chain: KL without attention, bits", most=1e-3, role="control"),
    ],
)
def wind_tunnel(seed: int, quick: bool) -> Numbers:
    """Bijection: 8 keys are shown with their values, in random order and none twice; the exact law of the next value is
    uniform over those that were not seen. Chain: 24 symbols of a hidden Markov chain of 4 states, which it seldom
    leaves, and 5 symbols; the exact law is by the forward algorithm. Causal transformers of width 32 and 4 heads, of
    one layer and two, learn from samples alone, and so do networks of the same blocks without attention. Divergences
    are exact, on 2,000 sequences. The paper's own figure, 10⁻³ to 10⁻⁴ bit with 2.7 million weights, is the mean
    difference of entropies. It is stored, too.
    """
    return _measured(seed, quick, _DEFAULT)


def _measured(seed: int, quick: bool, sizes: _Sizes) -> Numbers:
    drawn = torch.Generator().manual_seed(seed)
    found: Numbers = {}
    tasks = Bijection(sizes.pairs), Chain(sizes.states, sizes.symbols, sizes.length, drawn, stay=4.0)
    for place, (name, task) in enumerate(zip(("bijection", "chain"), tasks, strict=True)):
        for without in (False, True):
            apart, entropy = _apart(task, drawn, sizes, place, without, quick)
            suffix = "_without" if without else ""
            found |= {f"{name}{suffix}": apart / BIT, f"{name}_entropy{suffix}": entropy / BIT}
        found[f"{name}_ratio"] = found[f"{name}_without"] / found[name]
    return found | {"excess_risk": BIT * max(found["bijection"], found["chain"])}


def _apart(
    task: SequenceTask, drawn: torch.Generator, sizes: _Sizes, place: int, without: bool, quick: bool
) -> tuple[float, float]:
    """Mean divergence, and mean difference of entropies, in nats."""
    block = (lambda width, heads: TransformerBlock(width, heads, None)) if without else TransformerBlock
    options = {"width": sizes.width, "heads": sizes.heads, "depth": sizes.depths[place], "block": block}
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (), generator=drawn)))
        model = Placed(Transformer(task.vocabulary, len(task.judged), **options))
    contexts, own = share(32 if quick else sizes.contexts[place], drawn)
    steps = 30 if quick else sizes.steps[place] // 20 if without else sizes.steps[place]
    train(model, task, own, steps=steps, contexts=contexts, step_size=sizes.step_sizes[place])
    apart, entropy = divergence(model, task, task.sample(2000, drawn))
    return float(apart.mean()), float(entropy.abs().mean())
