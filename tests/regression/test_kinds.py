"""Whatever a tensor argument of a regression is given as, PyTorch's own errors are not what the user sees."""

import pytest
import torch
from tests.support.kinds import PARTS, raw_errors
from tests.support.rows import every_row, some_slow

from massieu import regression
from massieu.solve import ConjugateGradients


def n(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


H = n(1, 1, 6, 3)
two = torch.tensor([0.3, 0.7], dtype=torch.float64)
one = torch.tensor(1.0, dtype=torch.float64)

CASES = {
    "cma": (
        lambda **k: regression.conditional_mean_attention(kernel=regression.GaussianKernel.create(1.0), **k),
        {"query": H, "key": H, "value": H, "ridge": torch.tensor(0.3), "log_weight": torch.zeros(6)},
    ),
    "cma exp var": (
        lambda **k: regression.conditional_mean_attention(
            kernel=regression.ExponentialKernel.create(1.0), ridge=0.3, need_variance=True, **k
        ),
        {"query": H, "key": H, "value": H},
    ),
    "cma cg": (
        lambda **k: regression.conditional_mean_attention(
            kernel=regression.ExponentialKernel.create(1.0), ridge=0.3, method=ConjugateGradients(), **k
        ),
        {"query": H, "key": H, "value": H},
    ),
    "cma lr": (
        lambda **k: regression.conditional_mean_attention(
            kernel=regression.GaussianKernel.create(1.0), ridge=0.3, method=regression.LowRank(), **k
        ),
        {"query": H, "key": H, "value": H},
    ),
    "cma linear": (
        lambda **k: regression.conditional_mean_attention(kernel=regression.LinearKernel.create(), ridge=0.3, **k),
        {"query": H, "key": H, "value": H},
    ),
    "kernel scale": (regression.ExponentialKernel.create, {"scale": torch.tensor(1.0)}),
    "loo": (
        lambda **k: regression.leave_one_out(kernel=regression.GaussianKernel.create(1.0), ridge=0.3, **k),
        {"key": H, "value": H},
    ),
    "choose_ridge": (
        lambda **k: regression.choose_ridge(kernel=regression.GaussianKernel.create(1.0), **k),
        {"key": H, "value": H, "ridges": two},
    ),
    "ridge_from": (regression.ridge_from, {"noise_variance": two, "prior_variance": two}),
    "predictive_variance": (
        lambda **k: regression.conditional_mean_attention(
            H, H, H, kernel=regression.LinearKernel.create(), ridge=1.0, need_variance=True
        ).predictive_variance(**k),
        {"noise_variance": one, "prior_variance": one},
    ),
}


@pytest.mark.medium
@some_slow("part", range(PARTS), 1)
@pytest.mark.parametrize("name", CASES)
def test_no_argument_ends_in_an_error_of_pytorchs(name, part):
    function, arguments = CASES[name]
    assert raw_errors(function, arguments, part) == []


def test_a_kernel_made_without_create_is_told_how():
    with pytest.raises(TypeError, match=r"a kernel's number must be a tensor, got float: make the kernel by create"):
        regression.conditional_mean_attention(H, H, H, kernel=regression.ExponentialKernel(0.5), ridge=1.0)  # pyright: ignore


POINTS = n(1, 1, 4, 2)
KERNELS = {
    "Gaussian": regression.GaussianKernel.create(1.0),
    "exponential": regression.ExponentialKernel.create(0.5),
    "linear": regression.LinearKernel.create(),
    "of features": regression.FeatureKernel.create(lambda x: x),
}


@every_row("name", KERNELS)
def test_points_of_a_kernel_are_real(name):
    kernel = KERNELS[name]
    for wrong in (POINTS.to(torch.complex128), POINTS.round().long()):
        for call in (
            lambda wrong=wrong: kernel(wrong, POINTS),
            lambda wrong=wrong: kernel(POINTS, wrong),
            lambda wrong=wrong: kernel(wrong, wrong),
            lambda wrong=wrong: kernel.diagonal(wrong),
        ):
            with pytest.raises(
                TypeError, match=r"(left|right|points) must be a floating-point tensor, got a tensor of"
            ):
                call()
