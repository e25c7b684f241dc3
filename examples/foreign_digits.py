"""Digits that were never seen: which score tells them from the familiar ones?

A small classifier is trained on seven of the ten digits; the other three are foreign. Scores of foreignness: the free
energy of the logits, the Hopfield energy and the boosting energy of the features (N14), beside the largest softmax
probability, the Mahalanobis distance to the nearest class and the distance to the k-th nearest training image. The area
under the receiver operating characteristic, with its 95 % interval over bootstrapped test images; three sets of foreign
digits, each with its own classifier.

Run: python examples/foreign_digits.py [--picture FILE]
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from sklearn.covariance import LedoitWolf
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from massieu.energy import ood_score

FOREIGN = ((1, 4, 7), (0, 3, 9), (2, 5, 8))
STEPS, NEIGHBOUR, BOOTSTRAPS = 300, 10, 300


def trained(images: Tensor, labels: Tensor) -> tuple[nn.Sequential, nn.Linear]:
    """Features of unit length, and the linear classifier on them."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    head = nn.Linear(32, 10)
    optimiser = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=3e-3, weight_decay=1e-2)
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (256,))
        optimiser.zero_grad()
        F.cross_entropy(head(body(images[chosen])), labels[chosen]).backward()
        optimiser.step()
    return body, head


def scores_of(train: Tensor, train_labels: Tensor, test: Tensor, foreign_digits: tuple[int, ...]) -> dict[str, Tensor]:
    """Of each test image, larger = more foreign."""
    body, head = trained(train, train_labels)
    with torch.no_grad():
        known, found = body(train), body(test)
        logits = head(found)
        kept = [digit for digit in range(10) if digit not in foreign_digits]
        logits = logits[:, kept]
        unit, unit_found = F.normalize(known, dim=-1), F.normalize(found, dim=-1)
    noise = F.normalize(torch.randn(len(unit), unit.shape[-1], generator=torch.Generator().manual_seed(0)), dim=-1)
    return {
        "free energy of the logits": ood_score(logits, kind="energy"),
        "Hopfield energy": ood_score(unit_found, memory=unit, scale=8.0, kind="she"),
        "boosting against noise": ood_score(
            unit_found, memory=unit, outliers=noise, scale=8.0, kind="hopfield_boosting"
        ),
        "largest softmax": -logits.softmax(-1).amax(-1),
        "Mahalanobis": mahalanobis(known, train_labels, found),
        f"{NEIGHBOUR}-th neighbour": neighbour(unit, unit_found),
    }


def mahalanobis(known: Tensor, labels: Tensor, found: Tensor) -> Tensor:
    means = {int(label): known[labels == label].mean(0) for label in labels.unique()}
    centred = known - torch.stack([means[int(label)] for label in labels])
    shape = LedoitWolf(assume_centered=True).fit(centred.numpy())
    precision = torch.tensor(shape.precision_, dtype=known.dtype)
    deviations = found.unsqueeze(1) - torch.stack(list(means.values()))
    return torch.einsum("ncd,de,nce->nc", deviations, precision, deviations).amin(-1)


def neighbour(known: Tensor, found: Tensor) -> Tensor:
    distances, _ = NearestNeighbors(n_neighbors=NEIGHBOUR).fit(known.numpy()).kneighbors(found.numpy())
    return torch.tensor(distances[:, -1])


def area(score: Tensor, is_foreign: np.ndarray) -> tuple[float, float, float]:
    """AUROC and its bootstrapped 95 % interval."""
    generator, values = np.random.default_rng(0), score.numpy()
    drawn = (generator.integers(len(values), size=len(values)) for _ in range(BOOTSTRAPS))
    areas = [roc_auc_score(is_foreign[chosen], values[chosen]) for chosen in drawn]
    low, high = np.quantile(areas, [0.025, 0.975])
    return float(roc_auc_score(is_foreign, values)), float(low), float(high)


Areas = dict[str, tuple[float, float, float]]


def draw(found: list[Areas], path: Path) -> None:
    """Areas and their intervals, a row a score, a colour a set of foreign digits."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for place, (foreign, areas) in enumerate(zip(FOREIGN, found, strict=True)):
        middle, low, high = np.array(list(areas.values())).T
        rows = np.arange(len(areas)) + 0.18 * (place - 1)
        label = "foreign: " + ", ".join(map(str, foreign))
        axes.errorbar(middle, rows, xerr=(middle - low, high - middle), fmt="o", capsize=3, label=label)
    axes.set_yticks(range(len(found[0])), list(found[0]))
    axes.invert_yaxis()
    axes.set_xlabel("area under the receiver operating characteristic, 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/foreign_digits.png"), metavar="FILE")
    path = parser.parse_args().picture
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    found: list[Areas] = []
    for foreign in track(FOREIGN, "sets of digits", console=Console(file=sys.stderr), transient=True):
        is_known = ~torch.isin(labels, torch.tensor(foreign))
        split = train_test_split(images[is_known], labels[is_known], test_size=0.4, random_state=0)
        train, familiar, train_labels, _ = split
        test = torch.cat([familiar, images[~is_known]])
        is_foreign = np.r_[np.zeros(len(familiar)), np.ones(int((~is_known).sum()))]
        print(f"foreign digits {foreign}: {len(familiar)} familiar images, {int(is_foreign.sum())} foreign ones")
        scores = scores_of(train, train_labels, test, foreign)
        found.append({name: area(score, is_foreign) for name, score in scores.items()})
        for name, areas in found[-1].items():
            print("  {:<28} AUROC {:.3f} [{:.3f}, {:.3f}]".format(name, *areas))
    draw(found, path)


if __name__ == "__main__":
    main()
