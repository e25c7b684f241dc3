"""Bad calls end in a sentence of ours, not in a message from a kernel far below."""

import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import massieu
from massieu.errors import ConvergenceError

OURS = Path(massieu.__file__).parent


def works_or_says(attempt: Callable[..., object], *arguments: object) -> str:
    """What the call says, or that it works; an error that is not ours is raised again."""
    try:
        attempt(*arguments)
    except (TypeError, ValueError, ConvergenceError) as error:
        if not Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(OURS):
            raise
        return str(error)
    return "works"


def wrongs(like: Tensor) -> dict[str, object]:
    """What may be given in the place of a tensor like this one."""
    return {
        "integers": like.long(),
        "booleans": like > 0,
        "complex": like.to(torch.complex64),
        "NumPy": like.numpy(),
        "a list": like.tolist(),
        "nothing": None,
        "a float": 1.0,
        "a word": "word",
        "wider": torch.cat([like, like[..., :1]], -1),
        "narrower by a dimension": like[0],
        "a number": torch.tensor(1.0),
        "with a dimension more": like.expand(2, *like.shape),
        "with two more": like.expand(2, 3, *like.shape),
        "no row": like[:0],
        "no column": like[..., :0],
        "NaN": like * torch.nan,
        "infinity": like * torch.inf,
        "huge": like * 1e30,
        "bfloat16": like.bfloat16(),
        "float64": like.double(),
        "float8": like.to(torch.float8_e4m3fn),
        "meta": like.to("meta"),
        "sparse": like.to_sparse(),
    }
