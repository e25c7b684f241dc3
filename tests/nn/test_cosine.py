"""`massieu.nn.CosineHeads` against explicit matrices of cosines, and SciPy's law on the sphere."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.derivatives import check_derivatives
from torch import Tensor, nn

from massieu.nn import Attention, CosineHeads
from massieu.nn.strategy import Request

F64 = torch.float64


def bound(**options) -> CosineHeads:
    heads = CosineHeads(**options)
    heads.bind(2, 3, dtype=F64)
    return heads


def request(**changes) -> Request:
    return Request(log_weight=None, is_causal=False, need_weights=False, extra=None, dropout=0.0)._replace(**changes)


def draw(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, count, 3, dtype=F64, generator=generator) for count in (4, 5, 5)]


def explicit(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights and log Z, by a loop over pairs."""
    cosine = torch.empty(*query.shape[:3], key.shape[2], dtype=F64)
    for place in np.ndindex(*cosine.shape):
        q, k = query[place[:3]], key[(*place[:2], place[3])]
        cosine[place] = (q @ k) / math.sqrt(float(q @ q) * float(k @ k))
    scores = scale[:, None, None] * cosine
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return weights @ value, weights, scores.exp().sum(-1).log()


@pytest.mark.parametrize("need_weights", [False, True])
def test_output_weights_and_log_partition_are_those_of_cosines(need_weights):
    heads, (query, key, value) = bound(), draw()
    with torch.no_grad():
        heads.log_scale.copy_(torch.tensor([0.5, 2.0]))
    result = heads(query, key, value, request(need_weights=need_weights, extra="log_partition"))
    output, weights, log_partition = explicit(query, key, value, torch.tensor([0.5, 2.0], dtype=F64).exp())
    torch.testing.assert_close(result.output, output)
    torch.testing.assert_close(result.extra, log_partition)
    if need_weights:
        torch.testing.assert_close(result.weights, weights)


def test_the_scale_starts_at_ten_and_is_learned():
    heads, tensors = bound(), draw()
    torch.testing.assert_close(
        heads(*tensors, request()).output, explicit(*tensors, torch.full((2,), 10.0).double())[0]
    )
    heads(*tensors, request()).output.square().sum().backward()
    assert bool(heads.log_scale.grad.all())
    assert "log_scale" in dict(Attention(6, 2, heads=CosineHeads()).heads.named_parameters())
    constant = bound(scale=torch.tensor([1.0, 2.0]))
    assert constant.log_scale is None
    torch.testing.assert_close(
        constant(*tensors, request()).output, explicit(*tensors, torch.tensor([1.0, 2.0], dtype=F64))[0]
    )


def test_lengths_have_no_effect_and_scores_are_bounded():
    heads, (query, key, value) = bound(scale=4.0), draw()
    output, _, log_partition = heads(query, key, value, request(extra="log_partition"))
    for factor in (1e-200, 1e200):
        scaled, _, scaled_log_partition = heads(factor * query, key / factor, value, request(extra="log_partition"))
        torch.testing.assert_close(scaled, output)
        torch.testing.assert_close(scaled_log_partition, log_partition)
    assert bool(((log_partition - math.log(5)).abs() <= 4).all())


def test_log_partition_is_the_density_of_a_law_on_the_sphere():
    """exp(log Z)/n, times the constant of von Mises and Fisher, is the mean of SciPy's densities around the keys."""
    kappa = 3.0
    heads, (query, key, value) = bound(scale=kappa), draw()
    log_partition = heads(query, key, value, request(extra="log_partition")).extra
    q, k = (each[0, 0] / each[0, 0].norm(dim=-1, keepdim=True) for each in (query, key))
    densities = np.mean([stats.vonmises_fisher(mu, kappa).pdf(q.numpy()) for mu in k.numpy()], axis=0)
    constant = kappa / (4 * math.pi * math.sinh(kappa))
    np.testing.assert_allclose(log_partition[0, 0].exp() / 5 * constant, densities, rtol=1e-12)


def test_a_zero_vector_attends_to_all_alike_and_has_a_gradient():
    heads, (query, key, value) = bound(), draw()
    query[0, 0, 0], key[1, 1, 2] = 0, 0
    query.requires_grad_()
    key.requires_grad_()
    output = heads(query, key, value, request()).output
    torch.testing.assert_close(output[0, 0, 0], value[0, 0].mean(0))
    gradients = torch.autograd.grad(output.square().sum(), [query, key])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e3


@pytest.mark.medium
def test_derivatives():
    heads = bound()
    query, key, value = draw()

    def function(query: Tensor, key: Tensor, value: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        inputs = (query, key, value, request(extra="log_partition"))
        result = torch.func.functional_call(heads, {"log_scale": log_scale}, inputs)
        return result.output, result.extra

    check_derivatives(function, (query, key, value, torch.tensor([0.3, 1.0], dtype=F64)))


def test_a_sink_and_a_window_as_in_softmax_heads():
    attention = Attention(6, 2, batch_first=True, dtype=F64, heads=CosineHeads(sink=0.0, window=0))
    nn.init.zeros_(attention.out_proj.bias)
    tokens = torch.randn(1, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    output, _ = attention(tokens)
    # A query sees its own key and the sink.
    query, key, value = attention.project(tokens)
    share = torch.sigmoid(10 * torch.cosine_similarity(query, key, dim=-1))
    wanted = attention.out_proj((share.unsqueeze(-1) * value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, wanted)
