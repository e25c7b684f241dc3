"""Contrastive learning in one large batch, with the memory of a small one: gradients are cached between two passes.

The loss compares every image of a batch with every other one, so it needs all embeddings at once. `info_nce` keeps no
matrix of scores; what fills the memory then is the encoder. So the encoder runs twice. The first pass makes the
embeddings without gradients, and the loss gives their gradients, which are kept. The second pass takes a piece of the
batch at a time and hands its gradients on to the weights. The gradients are those of the whole batch.

Digits of scikit-learn; two shifted, scaled and noisy copies of an image are a pair.

Run: python examples/contrastive.py [--picture FILE]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

from massieu.ops import info_nce

PIECE, STEPS, LABELLED = 256, 80, 5


class Encoder(nn.Module):
    """An embedding of unit length, and the logarithm of the loss's temperature, which is learned too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.GELU()),
            *(nn.Flatten(), nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 32)),
        )
        self.log_temperature = nn.Parameter(torch.tensor(0.2).log())

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.layers(images), dim=-1)


def loss_of(encoder: Encoder, embeddings: Sequence[Tensor]) -> Tensor:
    loss = info_nce(*embeddings, temperature=encoder.log_temperature.exp(), symmetric=True)
    assert isinstance(loss, Tensor)
    return loss


def backward(encoder: Encoder, views: Sequence[Tensor]) -> Tensor:
    """Gradients of the loss of the whole batch; activations of no more than `PIECE` images are ever held."""
    with torch.no_grad():
        embeddings = [torch.cat([encoder(piece) for piece in view.split(PIECE)]) for view in views]
    embeddings = [embedding.requires_grad_() for embedding in embeddings]
    loss = loss_of(encoder, embeddings)
    loss.backward()
    for view, embedding in zip(views, embeddings, strict=True):
        assert embedding.grad is not None
        for piece, gradient in zip(view.split(PIECE), embedding.grad.split(PIECE), strict=True):
            encoder(piece).backward(gradient)
    return loss.detach()


def largest_difference(encoder: Encoder, views: Sequence[Tensor]) -> float:
    """Between the gradients of `backward` and those of one pass over the whole batch, relative to the largest."""
    found = []
    for cached in (True, False):
        encoder.zero_grad()
        if cached:
            backward(encoder, views)
        else:
            loss_of(encoder, [encoder(view) for view in views]).backward()
        found.append(torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]))
    encoder.zero_grad()
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image turned, scaled, sheared and moved a little, with noise."""
    change = 0.15 * torch.randn(len(images), 2, 3, generator=generator)
    grid = F.affine_grid(torch.eye(2, 3) + change, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved + 0.1 * torch.randn(moved.shape, generator=generator)


@torch.no_grad()
def accuracy(encoder: Encoder, images: Tensor, labels: Tensor) -> float:
    """Of the nearest class mean, where only `LABELLED` images of each digit have a label."""
    embedding = encoder(images)
    known = torch.cat([(labels == digit).nonzero()[:LABELLED, 0] for digit in range(10)])
    means = torch.stack([embedding[known[labels[known] == digit]].mean(0) for digit in range(10)])
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[known] = False
    nearest = torch.cdist(embedding[rest], means).argmin(1)
    return float((nearest == labels[rest]).double().mean())


@torch.no_grad()
def plane(encoder: Encoder, images: Tensor) -> Tensor:
    """The two directions of most variance of the embeddings, (images, 2)."""
    embedding = encoder(images)
    embedding = embedding - embedding.mean(0)
    return embedding @ torch.linalg.svd(embedding, full_matrices=False).Vh[:2].T


def draw(losses: list[float], before: Tensor, after: Tensor, labels: Tensor, path: Path) -> None:
    """The loss by step; embeddings before and after training, a colour a digit, which training never sees."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.7), layout="constrained")
    left.plot(losses, color="#2a6f97")
    left.set(title="InfoNCE, all images in one batch", xlabel="step", ylabel="loss (nats)")
    for axes, points, title in ((middle, before, "before training"), (right, after, "after training")):
        dots = axes.scatter(*points.T, c=labels, cmap="tab10", s=4, vmin=-0.5, vmax=9.5)
        axes.set(title=f"embeddings {title}", xlabel="direction of most variance", ylabel="the next one")
    figure.colorbar(dots, ax=right, label="digit", ticks=range(10))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/contrastive.png"), metavar="FILE")
    path = parser.parse_args().picture
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    encoder = Encoder()
    views = [augmented(images[:600], generator) for _ in range(2)]
    difference = largest_difference(encoder.double(), [view.double() for view in views])
    print(f"cached gradients differ from uncached ones by: {difference:.1e}")
    encoder.float()
    print(f"accuracy before training: {accuracy(encoder, images, labels):.3f}")
    before = plane(encoder, images)
    optimiser = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    losses: list[float] = []
    for _ in track(range(STEPS), "training", console=Console(file=sys.stderr), transient=True):
        optimiser.zero_grad()
        losses.append(float(backward(encoder, [augmented(images, generator) for _ in range(2)])))
        optimiser.step()
    temperature = float(encoder.log_temperature.detach().exp())
    print(f"loss of {len(images)} pairs: {losses[-1]:.3f}, temperature {temperature:.3f}")
    print(f"accuracy after training:  {accuracy(encoder, images, labels):.3f}")
    draw(losses, before, plane(encoder, images), labels, path)


if __name__ == "__main__":
    main()
