"""How much does filling in patches of unlabelled digits help a linear probe with few labels? (E21)"""

from functools import cache
from typing import NamedTuple

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

PATCHES = 16
WIDTH = 48
MASKED = (25, 50, 75)
"""Per cent of an image's patches that pretraining hides."""
LABELS = (20, 50, 200)
_LABEL_DRAWS = 20
_BATCH_SIZE = 64
_RIDGES = [10.0**power for power in range(-4, 4)]
"""The ridges that leave-one-out chooses among."""
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
    data = load_digits()
    num_training = round(0.8 * len(data.images))
    training = _Digits(data.images[:num_training], data.labels[:num_training])
    held_out = _Digits(data.images[num_training:], data.labels[num_training:])
    generator = torch.Generator().manual_seed(seed)
    draws = 2 if quick else _LABEL_DRAWS
    labelled_rows = {num_labels: _draw_labelled(training.labels, num_labels, draws, generator) for num_labels in LABELS}
    features = {"pixels": data.images.flatten(1), "random": _features(_model(seed), data.images)}
    numbers: Numbers = {}
    for share in MASKED:
        model = _pretrain(training.images, seed, share, 30 if quick else 1200)
        features[f"masked_{share}"] = _features(model, data.images)
        numbers[f"unexplained_{share}"] = _unexplained(model, training.images, held_out.images, share, generator)
    for name, points in features.items():
        for num_labels, rows in labelled_rows.items():
            numbers[f"{name}_{num_labels}"] = accuracy(
                points[:num_training], training.labels, rows, points[num_training:], held_out.labels
            )
    return numbers


class _Digits(NamedTuple):
    images: Float[Tensor, "n 16 4"]
    """Pixels from 0 to 1, by patches."""
    labels: Int[Tensor, " n"]


@cache
def load_digits() -> _Digits:
    bunch = require_extra("sklearn.datasets", "examples").load_digits()
    images = torch.from_numpy(bunch.images).float() / 16  # (n, 8, 8)
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2)  # (n, 4, 4, 2, 2)
    return _Digits(patches.flatten(3).flatten(1, 2), torch.from_numpy(bunch.target))


def _draw_labelled(
    labels: Int[Tensor, " n"], num_labels: int, draws: int, generator: torch.Generator
) -> Int[Tensor, "draws num_labels"]:
    """Random rows in each draw, equally many of each digit."""
    rows_of_digit = [(labels == digit).nonzero().squeeze(1) for digit in range(10)]

    def balanced_rows() -> Int[Tensor, " num_labels"]:
        return torch.cat(
            [rows[torch.randperm(len(rows), generator=generator)[: num_labels // 10]] for rows in rows_of_digit]
        )

    return torch.stack([balanced_rows() for _ in range(draws)])


def _model(seed: int) -> VectorTransformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return VectorTransformer(5, 4, length=PATCHES, width=WIDTH, is_causal=False)


def _hide_patches(images: Float[Tensor, "B 16 4"], hidden: Bool[Tensor, "B 16"]) -> Float[Tensor, "B 16 5"]:
    """The pixels of each patch, 0 where it is hidden, and 1 where it is."""
    return torch.cat([images.masked_fill(hidden.unsqueeze(-1), 0.0), hidden.unsqueeze(-1)], -1)


def _draw_hidden(count: int, share: int, generator: torch.Generator) -> Bool[Tensor, "count 16"]:
    """Random patches, equally many in each image: `share` per cent."""
    return torch.rand(count, PATCHES, generator=generator).argsort(-1) < PATCHES * share // 100


def _pretrain(images: Float[Tensor, "n 16 4"], seed: int, share: int, steps: int) -> VectorTransformer:
    model = _model(seed)
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        batch = images[torch.randint(len(images), (_BATCH_SIZE,), generator=generator)]
        hidden = _draw_hidden(_BATCH_SIZE, share, generator)
        return (model(_hide_patches(batch, hidden)) - batch)[hidden].square().mean()

    minimise(loss, list(model.parameters()), steps=steps, step_size=4e-3, averaged_share=0.1)
    return model


def _unexplained(
    model: VectorTransformer,
    training: Float[Tensor, "n 16 4"],
    held_out: Float[Tensor, "m 16 4"],
    share: int,
    generator: torch.Generator,
) -> float:
    """The model's squared error at hidden patches of held-out images, over that of the mean training image."""
    hidden = _draw_hidden(len(held_out), share, generator)
    with torch.no_grad():
        predictions = model(_hide_patches(held_out, hidden))
    error = (predictions - held_out)[hidden].square().mean()
    error_of_mean = (training.mean(0) - held_out)[hidden].square().mean()
    return float(error / error_of_mean)


def _features(model: VectorTransformer, images: Float[Tensor, "n 16 4"]) -> Float[Tensor, "n d"]:
    """The representation of whole images that the readout sees."""
    none_hidden = torch.zeros(images.shape[:2], dtype=torch.bool)
    with torch.no_grad():
        return model.hidden(_hide_patches(images, none_hidden)).flatten(1)


def accuracy(
    features: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    rows: Int[Tensor, "draws num_labels"],
    held_out_features: Float[Tensor, "m d"],
    held_out_labels: Int[Tensor, " m"],
) -> float:
    """The held-out accuracy of ridge regression on these rows; its ridge is the best by leave-one-out; mean over draws."""
    centre = features.mean(0)
    spread = features.var(0).sum().sqrt()
    keys = ((features[rows] - centre) / spread).double().unsqueeze(1)  # (draws, 1, num_labels, d)
    queries = ((held_out_features - centre) / spread).double()
    queries = queries.expand(len(rows), 1, *queries.shape)
    values = F.one_hot(labels[rows], 10).double().unsqueeze(1) - 0.1  # each digit is a tenth of them
    kernel = LinearKernel.create()
    ridge = choose_ridge(keys, values, _RIDGES, kernel=kernel).ridge
    scores = conditional_mean_attention(queries, keys, values, kernel=kernel, ridge=ridge).output
    return float((scores.squeeze(1).argmax(-1) == held_out_labels).double().mean())
