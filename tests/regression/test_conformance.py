"""Every kernel keeps the laws of kernels, against its formula for two points."""

import pytest
import torch
from tests.support.suites import compiled, every_check, without_a_case

from massieu.regression import ExponentialKernel, FeatureKernel, GaussianKernel, Kernel, LinearKernel
from massieu.regression.logarithms import FromLargest
from massieu.testing import KernelCase, kernel_checks

POINTS = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INTERNAL = "its last coordinate tells queries from keys, and it stands in the solver alone"

CASES = {
    "linear": KernelCase(LinearKernel.create(), POINTS, lambda a, b: a @ b),
    "exponential": KernelCase(ExponentialKernel.create(0.4), POINTS, lambda a, b: (0.4 * a @ b).exp()),
    "exponential of attention's scale": KernelCase(
        ExponentialKernel.create(), POINTS, lambda a, b: (3**-0.5 * a @ b).exp()
    ),
    "Gaussian": KernelCase(
        GaussianKernel.create(1.3), POINTS, lambda a, b: (-(a - b).square().sum() / (2 * 1.3**2)).exp()
    ),
    "features": KernelCase(
        FeatureKernel.create(lambda x: torch.cat([x, x.square()], -1)), POINTS, lambda a, b: a @ b + (a * a) @ (b * b)
    ),
    "from the largest": KernelCase(
        FromLargest(ExponentialKernel.create(0.4)),
        POINTS,
        lambda a, b: (0.4 * a[:-1] @ b[:-1] - b[-1] - a[-1]).exp(),
        exempt=dict.fromkeys(("symmetric", "positive", "diagonal", "conditional mean"), INTERNAL),
    ),
}


@every_check(kernel_checks, CASES)
def test_conforms(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", compiled(kernel_checks, CASES))
def test_compiled_is_eager(check):
    check()


@pytest.mark.medium
def test_every_kernel_has_a_case():
    assert not without_a_case(Kernel, [case.kernel for case in CASES.values()])
