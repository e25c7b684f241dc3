"""Float32 is float64, to its rounding; half precision is promoted."""

import torch

from massieu.testing.batching import DERIVED
from massieu.testing.checks import agree, expand
from massieu.testing.subject import Subject


def check_precision(subject: Subject) -> None:
    single = subject.measure.to(torch.float32)
    measure, eta = single.to(torch.float64), subject.far.float()
    exact = eta.double()
    wanted = {name: getattr(measure, name)(exact) for name in DERIVED[:3]}
    lead = exact.shape[: subject.queries + 1]
    largest = torch.stack([number.abs().reshape(*lead, -1).amax(-1) for number in wanted.values()]).amax(0)
    held = largest < torch.finfo(torch.float32).max
    spread = subject.trace(exact).sqrt()
    # What a relative perturbation of eta and of the measure by a few float32 roundings does to each number.
    rounding = 64 * torch.finfo(torch.float32).eps * (1 + subject.norm(exact)) * (1 + subject.norm(wanted["mean"]))
    sensitivity = (torch.ones_like(spread), 1 + spread + spread**2, 1 + spread**2 + spread**3)
    for (name, expected), size in zip(wanted.items(), sensitivity, strict=True):
        actual = getattr(single, name)(eta)
        if actual.dtype != torch.float32:
            raise AssertionError(f"{name}: float32 in, {actual.dtype} out")
        actual, expected = (torch.where(expand(held, number), number, 0.0) for number in (actual, expected))
        tolerance = expand(rounding * size, expected) + 1e-6 * expected.abs()
        agree(f"{name}: float32 = float64", exact, actual, expected, tolerance)
    half = subject.eta.bfloat16()
    inside = measure._in_domain(half.double())
    if inside is not None:
        # Rounding may carry a point across the bound.
        kept = inside.reshape(-1, inside.shape[-1]).all(0)
        half = half.index_select(subject.queries, kept.nonzero().squeeze(-1))
    for name in DERIVED:
        expected = getattr(single, name)(half.float())
        agree(f"{name}: half precision is promoted", half, getattr(single, name)(half), expected, 0.0)
