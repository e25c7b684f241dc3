"""What does a representation hold besides the posterior? (E17, Z2)"""

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from torch import Tensor

from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import BIT, Chain, divergence, train
from massieu.papers.experiments.transformer import Transformer

STATES = 4
SYMBOLS = 5
LENGTH = 24
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
    generator = torch.Generator().manual_seed(seed)
    chain = Chain(STATES, SYMBOLS, LENGTH, generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(SYMBOLS, LENGTH, width=32)
    tokens = chain.sample(1000 if quick else 8000, generator)
    numbers = _partial_r2(model, chain, tokens, "random")
    train(model, chain, generator, steps=20 if quick else 2000, contexts=128, step_size=5e-3)
    numbers |= _partial_r2(model, chain, tokens, "trained")
    kl, _ = divergence(model, chain, tokens[:2000])
    return numbers | {"divergence": float(kl.mean()) / BIT}


def _partial_r2(model: Transformer, chain: Chain, tokens: Int[Tensor, "B L+1"], suffix: str) -> Numbers:
    """The partial R² of each nuisance, given the exact posterior."""
    inputs = tokens[:, :-1]
    with torch.no_grad():
        representation = model.hidden(inputs)[:, -1].double()
    posterior = chain.chain.path(inputs).filtered[:, -1].exp()
    products = (posterior.unsqueeze(-1) * posterior.unsqueeze(-2)).flatten(1)
    posterior_features = torch.cat([posterior, products, posterior.clamp_min(1e-12).log()], 1)
    all_features = torch.cat([posterior_features, representation], 1)
    one_hot = F.one_hot(inputs, SYMBOLS).double()
    nuisances = {
        "last": one_hot[:, -1],
        "second": one_hot[:, -2],
        "fifth": one_hot[:, -5],
        "first": one_hot[:, 0],
        "counts": one_hot.sum(1),
    }
    return {
        f"{name}_{suffix}": 1 - residual_square(all_features, nuisance) / residual_square(posterior_features, nuisance)
        for name, nuisance in nuisances.items()
    }


def residual_square(inputs: Float64[Tensor, "n p"], targets: Float64[Tensor, "n k"]) -> float:
    """Mean squared residual on the second half of the rows of ridge regression fitted to the first half."""
    half = len(inputs) // 2
    inputs = inputs - inputs[:half].mean(0)
    targets = targets - targets[:half].mean(0)
    training = inputs[:half]
    gram = training.mT @ training
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram + ridge, training.mT @ targets[:half])
    return float((targets[half:] - inputs[half:] @ weights).square().mean())
