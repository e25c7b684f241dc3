"""Results in float32 are those of float64 up to rounding; half precision is promoted."""

import torch

from massieu.testing.checks import agree, expand
from massieu.testing.subject import DERIVED, Subject


def check_single(subject: Subject) -> None:
    single = subject.measure.to(torch.float32)
    measure = single.to(torch.float64)
    eta = subject.far.float()
    exact = eta.double()
    exact_results = {name: getattr(measure, name)(exact) for name in DERIVED[:3]}
    lead = exact.shape[: subject.queries + 1]
    largest = torch.stack([number.abs().reshape(*lead, -1).amax(-1) for number in exact_results.values()]).amax(0)
    is_representable = largest < torch.finfo(torch.float32).max
    spread = subject.trace(exact).sqrt()
    # What a relative perturbation of eta and of the measure by a few float32 roundings does to each number.
    rounding = (
        64 * torch.finfo(torch.float32).eps * (1 + subject.norm(exact)) * (1 + subject.norm(exact_results["mean"]))
    )
    sensitivity = (torch.ones_like(spread), 1 + spread + spread**2, 1 + spread**2 + spread**3)
    for (name, expected), size in zip(exact_results.items(), sensitivity, strict=True):
        actual = getattr(single, name)(eta)
        if actual.dtype != torch.float32:
            raise AssertionError(f"{name}: float32 in, {actual.dtype} out")
        actual, expected = (torch.where(expand(is_representable, number), number, 0.0) for number in (actual, expected))
        tolerance = expand(rounding * size, expected) + 1e-6 * expected.abs()
        agree(f"{name}: float32 = float64", exact, actual, expected, tolerance)


def check_half(subject: Subject) -> None:
    """Half precision, of eta and of the measure's own tensors, gives what the same numbers give in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        for measure in (subject.measure.to(torch.float32), subject.measure.to(dtype)):
            wide = measure.to(torch.float32)
            half = subject.kept(wide, subject.eta.to(dtype).float()).to(dtype)
            for name in DERIVED:
                actual = getattr(measure, name)(half)
                expected = getattr(wide, name)(half.float())
                if actual.dtype != torch.float32:
                    raise AssertionError(f"{name}: {dtype} in, {actual.dtype} out, expected torch.float32")
                agree(f"{name}: half precision is promoted", half, actual, expected, 0.0)
