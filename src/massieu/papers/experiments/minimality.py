"""What does a representation hold beside the posterior? (E17, Z2)"""

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from torch import Tensor

from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import BIT, Chain, divergence, train
from massieu.papers.experiments.transformer import Transformer

STATES, SYMBOLS, LENGTH = 4, 5, 24
_NUISANCES = {
    "last": "the last token",
    "second": "the second to last token",
    "fifth": "the fifth to last token",
    "first": "the first token",
    "counts": "the number of times that each token came",
}


@experiment(
    "minimality",
    question="What does a trained representation keep of its tokens besides the posterior of the next token?",
    claims="E17, Z2",
    minutes=3,
    criteria=[
        *described({f"{name}_trained": f"partial R² of {title}" for name, title in _NUISANCES.items()}),
        *described({f"{name}_random": f"partial R² of {title}, random weights" for name, title in _NUISANCES.items()}),
        *described({"divergence": "KL(exact ‖ model) of the next token, bits"}),
    ],
)
def minimality(seed: int, quick: bool) -> Numbers:
    """A causal transformer of two layers and width 32 learns to predict a hidden Markov chain of 4 states and 5
    symbols, in 2,000 steps of 128 sequences of 24. Its representation is what the readout sees at the last token. A
    nuisance is predicted by ridge regression: from the exact posterior of the hidden state (its probabilities and their
    products), and from this and the representation together. Partial R² is the share of the first regression's residual
    that the second explains, on other sequences. A minimal representation has 0.
    """
    drawn = torch.Generator().manual_seed(seed)
    chain = Chain(STATES, SYMBOLS, LENGTH, drawn)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(SYMBOLS, LENGTH, width=32)
    tokens = chain.sample(1000 if quick else 8000, drawn)
    found = _held(model, chain, tokens, "random")
    train(model, chain, drawn, steps=20 if quick else 2000, contexts=128, step_size=5e-3)
    found |= _held(model, chain, tokens, "trained")
    return found | {"divergence": float(divergence(model, chain, tokens[:2000])[0].mean()) / BIT}


def _held(model: Transformer, chain: Chain, tokens: Int[Tensor, "B L+1"], suffix: str) -> Numbers:
    shown = tokens[:, :-1]
    with torch.no_grad():
        hidden = model.hidden(shown)[:, -1].double()
    posterior = chain.chain.path(shown).filtered[:, -1].exp()
    products = (posterior.unsqueeze(-1) * posterior.unsqueeze(-2)).flatten(1)
    known = torch.cat([posterior, products, posterior.clamp_min(1e-12).log()], 1)
    one_hot = F.one_hot(shown, SYMBOLS).double()
    nuisances = {
        "last": one_hot[:, -1],
        "second": one_hot[:, -2],
        "fifth": one_hot[:, -5],
        "first": one_hot[:, 0],
        "counts": one_hot.sum(1),
    }
    both = torch.cat([known, hidden], 1)
    return {
        f"{name}_{suffix}": 1 - unexplained(both, wanted) / unexplained(known, wanted)
        for name, wanted in nuisances.items()
    }


def unexplained(inputs: Float64[Tensor, "n p"], wanted: Float64[Tensor, "n k"]) -> float:
    """Mean square of what ridge regression on the first half leaves on the second."""
    half = len(inputs) // 2
    centred, targets = inputs - inputs[:half].mean(0), wanted - wanted[:half].mean(0)
    learned = centred[:half]
    gram = learned.mT @ learned
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram + ridge, learned.mT @ targets[:half])
    return float((targets[half:] - centred[half:] @ weights).square().mean())
