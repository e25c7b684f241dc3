"""How much does filling in patches of unlabelled digits help a linear probe with few labels? (E21)"""

from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.errors import require_extra
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.papers.experiments.transformer import VectorTransformer
from massieu.regression import LinearKernel, choose_ridge, conditional_mean_attention

PLACES, WIDTH = 16, 48
MASKED = (25, 50, 75)
"""Per cent of an image's patches that pretraining hides."""
LABELS = (20, 50, 200)
_DRAWS, _IMAGES = 20, 64
_RIDGES = [10.0**power for power in range(-4, 4)]
_TITLES = {
    "pixels": "raw pixels",
    "random": "a transformer of random weights",
    **{f"masked_{share}": f"a transformer pretrained with {share} % of the patches hidden" for share in MASKED},
}


@experiment(
    "digits",
    question="How much does filling in patches of unlabelled digits help a linear probe with few labels?",
    claims="E21",
    minutes=5,
    criteria=[
        *described(
            {
                f"{name}_{labels}": f"accuracy of a linear probe with {labels} labels on {title}"
                for labels in LABELS
                for name, title in _TITLES.items()
            }
        ),
        *described(
            {
                f"unexplained_{share}": f"share of hidden pixels' variance not filled in, {share} % hidden"
                for share in MASKED
            }
        ),
    ],
)
def digits(seed: int, quick: bool) -> Numbers:
    """Scikit-learn's digits, 8×8 pixels, are 16 patches of 2×2; the last fifth is held out. A transformer of two layers and
    width 48 sees an image of which a quarter, a half or three quarters of the patches are hidden. It fills in their pixels by
    squared error, in 1,200 steps of 64 images without labels. Then it sees whole images, and a linear probe reads the digit
    off its tokens: ridge regression on equally many labels of each digit, its ridge by leave-one-out. Accuracies are on
    held-out images, the mean over 20 draws of the labelled ones, the same draws for every representation. The transformer of
    random weights is the one that pretraining starts from.
    """
    images, kinds = _digits()
    kept = round(0.8 * len(images))
    drawn = torch.Generator().manual_seed(seed)
    chosen = {labels: _labelled(kinds[:kept], labels, 2 if quick else _DRAWS, drawn) for labels in LABELS}
    represented, numbers = {"pixels": images.flatten(1), "random": _tokens(_model(seed), images)}, Numbers()
    for share in MASKED:
        model = _pretrained(images[:kept], seed, share, 30 if quick else 1200)
        represented[f"masked_{share}"] = _tokens(model, images)
        numbers[f"unexplained_{share}"] = _unexplained(model, images, kept, share, drawn)
    for name, features in represented.items():
        for labels, rows in chosen.items():
            numbers[f"{name}_{labels}"] = accuracy(features[:kept], kinds[:kept], rows, features[kept:], kinds[kept:])
    return numbers


@cache
def _digits() -> tuple[Float[Tensor, "1797 16 4"], Int[Tensor, " 1797"]]:
    """Pixels from 0 to 1 by patches, and which digit it is."""
    found = require_extra("sklearn.datasets", "examples").load_digits()
    images = torch.from_numpy(found.images).float() / 16
    return images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2), torch.from_numpy(found.target)


def _labelled(kinds: Int[Tensor, " n"], labels: int, draws: int, drawn: torch.Generator) -> Int[Tensor, "draws labels"]:
    """Rows, equally many of each digit."""
    of_kind = [(kinds == kind).nonzero().squeeze(1) for kind in range(10)]
    choose = lambda rows: rows[torch.randperm(len(rows), generator=drawn)[: labels // 10]]  # noqa: E731
    return torch.stack([torch.cat([choose(rows) for rows in of_kind]) for _ in range(draws)])


def _model(seed: int) -> VectorTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return VectorTransformer(5, 4, length=PLACES, width=WIDTH, is_causal=False)


def _shown(images: Float[Tensor, "B 16 4"], hidden: Bool[Tensor, "B 16"]) -> Float[Tensor, "B 16 5"]:
    """Pixels, 0 where they are hidden, and whether they are."""
    return torch.cat([images.masked_fill(hidden.unsqueeze(-1), 0.0), hidden.unsqueeze(-1)], -1)


def _hidden(count: int, share: int, drawn: torch.Generator) -> Bool[Tensor, "count 16"]:
    """Equally many patches of each image."""
    return torch.rand(count, PLACES, generator=drawn).argsort(-1) < PLACES * share // 100


def _pretrained(images: Float[Tensor, "n 16 4"], seed: int, share: int, steps: int) -> VectorTransformer:
    model, drawn = _model(seed), torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        batch = images[torch.randint(len(images), (_IMAGES,), generator=drawn)]
        hidden = _hidden(_IMAGES, share, drawn)
        return (model(_shown(batch, hidden)) - batch)[hidden].square().mean()

    minimise(loss, list(model.parameters()), steps=steps, step_size=4e-3, averaged=0.1)
    return model


def _unexplained(
    model: VectorTransformer, images: Float[Tensor, "n 16 4"], kept: int, share: int, drawn: torch.Generator
) -> float:
    """Squared error at hidden patches of held-out images, over that of each pixel's mean."""
    held_out = images[kept:]
    hidden = _hidden(len(held_out), share, drawn)
    with torch.no_grad():
        found = model(_shown(held_out, hidden))
    left, all_of_it = ((guess - held_out)[hidden].square().mean() for guess in (found, images[:kept].mean(0)))
    return float(left / all_of_it)


def _tokens(model: VectorTransformer, images: Float[Tensor, "n 16 4"]) -> Float[Tensor, "n d"]:
    """What the readout sees of whole images."""
    with torch.no_grad():
        return model.hidden(_shown(images, torch.zeros(images.shape[:2], dtype=torch.bool))).flatten(1)


def accuracy(
    features: Float[Tensor, "n d"],
    kinds: Int[Tensor, " n"],
    rows: Int[Tensor, "draws labels"],
    asked: Float[Tensor, "m d"],
    answers: Int[Tensor, " m"],
) -> float:
    """Of ridge regression on the labels of these rows, its ridge the best by leave-one-out; the mean over draws."""
    centre, spread = features.mean(0), features.var(0).sum().sqrt()
    keys, queries = (((points - centre) / spread).double() for points in (features[rows], asked))
    keys, queries = keys.unsqueeze(1), queries.expand(len(rows), 1, *queries.shape)
    values = F.one_hot(kinds[rows], 10).double().unsqueeze(1) - 0.1  # each digit is a tenth of them
    ridge = choose_ridge(keys, values, _RIDGES, kernel=LinearKernel.create()).ridge
    told = conditional_mean_attention(queries, keys, values, kernel=LinearKernel.create(), ridge=ridge).output
    return float((told.squeeze(1).argmax(-1) == answers).double().mean())
