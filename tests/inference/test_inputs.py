"""What samplers are given wrongly: it works, or it is one sentence of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.rows import every_row
from tests.support.sentences import works_or_says, wrongs

from massieu import inference

POSITION = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def normal(x: Any, t: float = 1.0) -> Any:
    return -t * x.square().sum(-1)


CALLS: dict[str, Callable[[Any], object]] = {
    "langevin_init": lambda x: inference.langevin_init(x, normal),
    "log_density": lambda x: inference.langevin_init(POSITION, lambda position: x),
    "anneal": lambda x: inference.anneal(x, normal, lambda position, t, generator: position, schedule=2),
    "schedule": lambda x: inference.anneal(POSITION, normal, lambda position, t, generator: position, schedule=x),
    "path": lambda x: inference.anneal(POSITION, lambda y, t: x, lambda position, t, generator: position, schedule=2),
    "contrastive_divergence": lambda x: inference.contrastive_divergence(lambda v: v.sum(-1), x, POSITION),
    "effective_sample_size": lambda x: inference.effective_sample_size(x),
    "resample": lambda x: inference.resample(x),
}


@pytest.mark.filterwarnings("ignore")
@every_row("name", CALLS)
def test_any_argument_works_or_is_one_sentence(name: str):
    for label, given in wrongs(POSITION).items():
        try:
            works_or_says(CALLS[name], given)
        except Exception as error:
            error.add_note(label)
            raise
