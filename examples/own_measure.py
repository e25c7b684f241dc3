"""A measure of your own: one hook, the laws it must obey, and attention over it trains.

The memory holds 100 images of digits. A query is one of them with its lower half erased, and with black and white
exchanged half of the time; what is wanted back is the whole image, in the query's colours. Softmax attention, whose
measure is one atom at each image, has nothing to give for the exchanged ones. The measure that the task asks for has an
atom at each image and one at its negative:

    A(eta) = log Σ_n 2 cosh(x_n·eta).

That line is all there is to write. Run: python examples/own_measure.py
"""

import torch
from jaxtyping import Float
from sklearn.datasets import load_digits
from torch import Tensor

from massieu.measures import Atoms, Measure
from massieu.testing import MeasureCase, measure_checks


class MirroredAtoms(Measure):
    """An atom at each point and one at its negative, all of one weight."""

    points: Float[Tensor, "*batch N d"]

    @property
    def batch_shape(self) -> torch.Size:
        return self.points.shape[:-2]

    @property
    def event_shape(self) -> torch.Size:
        return self.points.shape[-1:]

    def _log_partition(self, eta: Tensor) -> Tensor:
        scores = (self._align(self.points, eta, 2) @ eta.unsqueeze(-1)).squeeze(-1)
        return torch.cat([scores, -scores], -1).logsumexp(-1)


def obeys_the_laws() -> None:
    """Mean, Fisher information, KL divergence, … come from the one hook; so do the checks that they are right.

    In a test: ``@pytest.mark.parametrize(("name", "check"), measure_checks(case))``, one item for each law.
    """
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = MeasureCase(
        MirroredAtoms(points),
        log_partition=lambda eta: (2 * torch.cosh(eta @ points.mT)).sum(-1).log(),  # an independent oracle, by cosh
        scales=(0.0, 1e-4, 1.0, 15.0),
    )
    for _, check in measure_checks(case):
        check()


def recall_error(memory: Measure, images: Tensor, steps: int = 300) -> float:
    """Train the map from query to eta; mean squared error of recall, where 1 is to answer nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.eye(images.shape[-1]).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=0.02)
    error = torch.tensor(1.0)
    for _ in range(steps):
        colour = torch.randint(0, 2, (len(images), 1), generator=generator) * 2.0 - 1.0
        wanted = colour * images
        query = torch.cat([wanted[:, :32], torch.zeros_like(wanted[:, 32:])], -1)
        error = (memory.mean(query @ weight) - wanted).square().sum(-1).mean() / images.square().sum(-1).mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
    return float(error.detach())


def main() -> None:
    obeys_the_laws()
    print("MirroredAtoms obeys the laws of a measure")
    images = torch.from_numpy(load_digits().data[:100]).float()
    images = torch.nn.functional.normalize(images - images.mean(0), dim=-1)
    print(f"error of recall, softmax attention: {recall_error(Atoms.create(images), images):.3f}")
    print(f"error of recall, mirrored atoms:    {recall_error(MirroredAtoms(images), images):.3f}")


if __name__ == "__main__":
    main()
