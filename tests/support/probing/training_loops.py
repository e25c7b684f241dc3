"""Runs a loop of `examples/training_loops.py` and looks on beside it: the losses, norms and logits that records should have."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from examples import training_loops
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import massieu
from massieu.probing.monitor.record import MonitorRecord


@dataclass
class Witness:
    """What training does at each optimiser step, recomputed without the monitor.

    Attributes:
        losses: the sum of all losses from which gradients came.
        norms: of all gradients before they are clipped, in float64.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    _loss: float = 0.0
    _norm: float | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        backward, clip = Tensor.backward, nn.utils.clip_grad_norm_

        def backward_seen(loss: Tensor, *arguments: Any, **keywords: Any) -> None:
            self._loss += loss.item()
            backward(loss, *arguments, **keywords)

        def clip_seen(parameters: Any, *arguments: Any, **keywords: Any) -> Tensor:
            parameters = list(parameters)
            self._norm = norm_of(parameters)
            return clip(parameters, *arguments, **keywords)

        def step_seen(optimizer: Optimizer, *_: Any) -> None:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.norms.append(norm_of(trained) if self._norm is None else self._norm)
            self.losses.append(self._loss)
            self._norm, self._loss = None, 0.0

        hook = register_optimizer_step_post_hook(step_seen)
        with (
            mock.patch.object(Tensor, "backward", backward_seen),
            mock.patch("torch.nn.utils.clip_grad_norm_", clip_seen),
        ):
            yield
        hook.remove()


def norm_of(parameters: list[Tensor]) -> float:
    gradients = [parameter.grad.double() for parameter in parameters if parameter.grad is not None]
    return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))


@dataclass
class Run:
    """A loop that has ended: its weights, its records by step, and what was seen beside."""

    weights: list[Tensor]
    records: dict[int, MonitorRecord]
    losses: list[float]
    norms: list[float]
    largest_logits: list[Tensor]


def trained(name: str, watched: bool, **options: Any) -> Run:
    """One loop, with the monitor or without; afterwards the largest logits of its model on the batch that was measured.

    Args:
        options: more arguments of the monitor.
    """
    records: dict[int, MonitorRecord] = {}
    witness = Witness()
    made = mock.patch("massieu.Monitor", functools.partial(massieu.Monitor, **options))
    with witness.looking(), made:
        loop = training_loops.LOOPS[name]
        model = loop((lambda record, step: records.update({step: record})) if watched else None)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return Run(weights, records, witness.losses, witness.norms, largest_logits(name, model))


def largest_logits(name: str, model: nn.Module) -> list[Tensor]:
    """Of each layer's heads, in the precision of training: scale · query · key over the keys that a query may see."""
    fused = F.scaled_dot_product_attention
    found: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.double() @ repeated.double().mT / math.sqrt(query.shape[-1])
        if name != "vit":
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        found.append(scores.amax((0, 2, 3)).detach())
        return fused(query, key, value, *arguments, **keywords)

    under = torch.autocast("cpu", torch.bfloat16, enabled=name in ("nanogpt", "lightning"))
    # With gradients: without them PyTorch's encoder takes a path of its own past this function.
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attend), under:
        model.eval()(images() if name == "vit" else training_loops.FIXED)
    return found


def images() -> Tensor:
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images[:16] / 16, dtype=torch.float32)


def in_process(rank: int, size: int) -> tuple[Run, Run]:
    """`ddp` without and with the monitor, in one of several processes."""
    return trained("ddp", watched=False), trained("ddp", watched=True)
