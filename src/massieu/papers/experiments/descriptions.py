"""Numbers without a threshold, for experiments that describe."""

from collections.abc import Mapping

from massieu.papers.experiments.criterion import Criterion


def described(titles: Mapping[str, str]) -> list[Criterion]:
    """A row for each quantity, by its title."""
    return [Criterion(quantity, title, role="description") for quantity, title in titles.items()]
