"""Theorem 1 of Shim as an animation that a browser runs without a script: docs/images/theorem_1.svg.

Three populations of tokens pass through six layers. In each layer attention moves every token, then a renormalisation
moves it again. All maps are affine and those of the law, so that no particle is simulated.

Run: python -m scripts.theorem_1
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scripts.example_outputs import IMAGES
from torch import Tensor

from massieu.measures import Gaussian
from massieu.papers import theory
from massieu.population import Operator, Renormalisation, TraceRenormalisation
from massieu.population.operator import moments

PICTURE = IMAGES / "theorem_1.svg"
LAYERS = 6
PARTICLES = 80
KEY_COVARIANCE = torch.tensor([[1.2, 0.5], [0.5, 0.7]], dtype=torch.float64)
CENTRE = torch.zeros(2, dtype=torch.float64)
IDENTITY = torch.eye(2, dtype=torch.float64)

PANEL = 240
"""Width and height of a panel in the picture's units."""
UNIT = 15
"""The picture's units for 1 of a hidden state."""
SECONDS_OF_A_MOVE = 0.8
MARKED_SECTOR = math.pi / 3
"""Particles in this sector around the vertical axis are red, so that one sees them turn."""
BLUE, RED, GREY = "#2a6f97", "#c8553d", "#777777"


@dataclass(frozen=True)
class Population:
    """One panel: a law, the keys that attention reads for it, and what follows attention."""

    title: str
    caption: str
    law: Gaussian
    keys: Callable[[Gaussian], Gaussian]
    step: float
    renormalisation: Operator


def populations() -> list[Population]:
    """The theorem's population, and two that leave out one of its assumptions each."""
    hidden = theory.equilibrium(CENTRE, KEY_COVARIANCE)
    keys = theory.key_law(hidden, KEY_COVARIANCE)
    other = Gaussian.create(CENTRE, torch.tensor([[0.12, 0.0], [0.0, 1.3]], dtype=torch.float64))
    return [
        Population(
            "the theorem",
            "every token returns to its place",
            hidden,
            lambda _: keys,
            0.5,
            Renormalisation.create(hidden.location, hidden.covariance),
        ),
        Population(
            "another covariance",
            "the law returns, its tokens turn",
            other,
            lambda _: keys,
            1.0,
            Renormalisation.create(other.location, other.covariance),
        ),
        Population(
            "only the size is restored",
            "the tokens end on a line",
            hidden,
            lambda law: law,
            0.3,
            TraceRenormalisation.create(hidden.covariance.trace()),
        ),
    ]


def courses(population: Population) -> Tensor:
    """Where each token is before the first layer and after each of the 2·LAYERS moves: (moves + 1, PARTICLES, 2)."""
    law = population.law
    places = quantile_points(law)
    course = [places]
    for _ in range(LAYERS):
        keys = population.keys(law)
        places = places + population.step * keys.mean(places)  # attention to infinitely many keys is ∇A
        law = theory.after_layer(law, keys, population.step)
        course.append(places)
        # Renormalisation as an operator on particles would use the moments of these few, and not those of the law.
        affine = population.renormalisation.affine(moments(law))
        places = places @ affine.matrix.mT + affine.offset
        law = population.renormalisation.gaussian(law)
        course.append(places)
    return torch.stack(course)


def quantile_points(law: Gaussian) -> Tensor:
    """PARTICLES points spread as the law is: radii at equal steps of probability, angles at the golden one."""
    ranks = (torch.arange(PARTICLES, dtype=torch.float64) + 0.5) / PARTICLES
    radii = (-2 * torch.log1p(-ranks)).sqrt()  # of a standard Gaussian in two dimensions
    angles = torch.arange(PARTICLES, dtype=torch.float64) * math.pi * (3 - math.sqrt(5))
    standard = torch.stack([radii * angles.cos(), radii * angles.sin()], -1)
    root = Renormalisation.create(CENTRE, law.covariance).matrix(IDENTITY)  # C^½
    return law.location + standard @ root.mT


def animation() -> str:
    """The picture as SVG, whose animation the browser runs."""
    width = PANEL * len(populations())
    body = "".join(_panel(population, PANEL * n) for n, population in enumerate(populations()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PANEL + 54}" font-family="sans-serif" '
        f'font-size="13" text-anchor="middle"><rect width="100%" height="100%" fill="white"/>'
        f"{body}{_phases(width / 2)}</svg>\n"
    )


def _panel(population: Population, left: int) -> str:
    course = courses(population)
    shown = course * torch.tensor([UNIT, -UNIT], dtype=torch.float64)  # the picture's second axis points down
    first = course[0]
    marked = torch.atan2(first[:, 0], first[:, 1]).abs() < MARKED_SECTOR / 2
    tokens = "".join(_token(shown[:, n], RED if is_marked else BLUE) for n, is_marked in enumerate(marked.tolist()))
    middle = PANEL / 2
    return (
        f'<g transform="translate({left + middle} {20 + middle})">{_ellipse(population.law)}{tokens}</g>'
        f'<text x="{left + middle}" y="15" font-weight="bold">{population.title}</text>'
        f'<text x="{left + middle}" y="{PANEL + 30}">{population.caption}</text>'
    )


def _token(places: Tensor, colour: str) -> str:
    """A dot that moves from place to place."""
    animated = "".join(
        f'<animate attributeName="{name}" values="{_numbers(coordinates)}" {_timing()}/>'
        for name, coordinates in (("cx", places[:, 0]), ("cy", places[:, 1]))
    )
    x, y = places[0].tolist()
    return f'<circle r="2.6" cx="{x:.2f}" cy="{y:.2f}" fill="{colour}" fill-opacity="0.8">{animated}</circle>'


def _ellipse(law: Gaussian) -> str:
    """Two standard deviations of the law before the first layer."""
    variances, axes = torch.linalg.eigh(law.covariance)
    long_axis = axes[:, 1]
    degrees = -math.degrees(math.atan2(long_axis[1], long_axis[0]))
    short_radius, long_radius = (2 * UNIT * variances.sqrt()).tolist()
    return (
        f'<ellipse rx="{long_radius:.2f}" ry="{short_radius:.2f}" transform="rotate({degrees:.2f})" fill="none" '
        f'stroke="{GREY}" stroke-dasharray="4 3"/>'
    )


def _phases(middle: float) -> str:
    """Which of the two maps is being applied."""
    words = ("attention", "renormalisation")
    texts = ""
    for place, word in enumerate(words):
        visible = ";".join("1" if move % 2 == place else "0" for move in range(2 * LAYERS))
        animated = f'<animate attributeName="opacity" calcMode="discrete" values="{visible}" {_timing()}/>'
        texts += f'<text x="{middle}" y="{PANEL + 50}" fill="{GREY}" opacity="0">{word}{animated}</text>'
    return texts


def _timing() -> str:
    return f'dur="{2 * LAYERS * SECONDS_OF_A_MOVE:g}s" repeatCount="indefinite"'


def _numbers(coordinates: Tensor) -> str:
    return ";".join(f"{value:.2f}" for value in coordinates.tolist())


if __name__ == "__main__":
    PICTURE.write_text(animation(), encoding="utf-8")
    print(f"picture: {PICTURE}")
