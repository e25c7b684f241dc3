"""Every public function of populations refuses what it cannot take with one sentence, before work is done."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu import population
from massieu.measures import Gaussian
from massieu.papers import theory
from massieu.population import cloud_shape, clusters, self_attention

WIDTH = 3
GENERATOR = torch.Generator().manual_seed(0)
CLOUD = torch.randn(10, WIDTH, generator=GENERATOR, dtype=torch.float64)
SAME = torch.eye(WIDTH, dtype=torch.float64)
LAW = Gaussian.create(torch.zeros(WIDTH, dtype=torch.float64), SAME)
DIRECTIONS = cloud_shape.random_directions(WIDTH, 4, generator=GENERATOR)
HEADS = CLOUD[None, None]
NAN = math.nan

CASES = {
    "directions: generator": (
        lambda: cloud_shape.random_directions(2, 1, generator=None),
        TypeError,
        "generator must be a torch",
    ),
    "directions: dtype": (
        lambda: cloud_shape.random_directions(2, 1, generator=GENERATOR, dtype=torch.int64),
        TypeError,
        "dtype must be floating-point, got torch.int64",
    ),
    "cumulants: directions": (
        lambda: cloud_shape.projected_cumulants(CLOUD, [1.0]),
        TypeError,
        "directions must be .* got list",
    ),
    "distance: directions": (
        lambda: cloud_shape.squared_gaussian_distance(CLOUD, None),
        TypeError,
        "directions must be .* got None",
    ),
    "spread: 4.5 tokens": (
        lambda: cloud_shape.gaussian_cumulant_spread(4.5),
        TypeError,
        "tokens must be a whole number, got 4.5",
    ),
    "null: 4.5 tokens": (
        lambda: cloud_shape.gaussian_distance_null(4.5),
        TypeError,
        "tokens must be a whole number, got 4.5",
    ),
    "clusters: radii": (
        lambda: clusters.cluster_count(CLOUD, radius=torch.ones(2)),
        TypeError,
        "radius must be a number",
    ),
    "clusters: limit": (
        lambda: clusters.cluster_count(CLOUD, limit=2.5),
        TypeError,
        "limit must be a whole number, got 2.5",
    ),
    "levels: scales": (
        lambda: self_attention.self_attention_levels(CLOUD, scale=torch.ones(2)),
        TypeError,
        "scale must be a number",
    ),
    "flow: list": (
        lambda: theory.gaussian_flow(LAW, value=[1], score=SAME, time=1.0),
        TypeError,
        "value must be a floating-point tensor, got list",
    ),
    "flow: NaN": (
        lambda: theory.gaussian_flow(LAW, value=SAME * NAN, score=SAME, time=1.0),
        ValueError,
        "value must be finite",
    ),
    "flow: no head": (
        lambda: theory.gaussian_flow(LAW, value=SAME.new_zeros(0, 3, 3), score=SAME.new_zeros(0, 3, 3), time=1.0),
        ValueError,
        r"or \(H, 3, 3\), got \(0, 3, 3\)",
    ),
    "layer: scale": (
        lambda: population.AttentionLayer.from_score(SAME, SAME, scale=NAN),
        ValueError,
        "scale must be finite",
    ),
    "layer: step": (
        lambda: population.AttentionLayer.from_score(SAME, SAME, step_size=NAN),
        ValueError,
        "step_size must be finite",
    ),
    "layer: bias": (
        lambda: population.AttentionLayer.from_score(SAME, SAME, bias=[0.0] * 3),
        TypeError,
        "bias must be a floating-point tensor, got list",
    ),
    "layer: NaN": (
        lambda: population.AttentionLayer.from_score(SAME, SAME, bias=SAME[0] * NAN),
        ValueError,
        "bias must be finite",
    ),
    "layer: list": (
        lambda: population.AttentionLayer.from_score([1], SAME),
        TypeError,
        "score must be a floating-point tensor",
    ),
    "function: None": (
        lambda: population.FeedForward.create(lambda z: None)(CLOUD),
        TypeError,
        "must give a tensor, got NoneType",
    ),
    "sinkhorn: integers": (
        lambda: population.sinkhorn(HEADS.long(), HEADS.long()),
        TypeError,
        "query must be a floating-point tensor, got a tensor of torch.int64",
    ),
    "sinkhorn: no token": (
        lambda: population.sinkhorn(HEADS[:, :, :0], HEADS[:, :, :0]),
        ValueError,
        "at least one token",
    ),
    "sinkhorn: NaN": (
        lambda: population.sinkhorn(HEADS, HEADS, log_weight=torch.full((10,), NAN)),
        ValueError,
        "log_weight must be finite or -inf",
    ),
    "sinkhorn: tolerance": (
        lambda: population.sinkhorn(HEADS, HEADS, tolerance=-1.0),
        ValueError,
        "tolerance must be finite and at least 0, got -1.0",
    ),
    "sinkhorn: steps": (
        lambda: population.sinkhorn(HEADS, HEADS, max_steps=0),
        ValueError,
        "max_steps must be a whole number, at least 1",
    ),
    "rank: list": (lambda: population.effective_rank([1.0]), TypeError, "spectrum must be a floating-point tensor"),
    "equilibrium: list": (
        lambda: theory.equilibrium([1.0], SAME),
        TypeError,
        "location must be a floating-point tensor",
    ),
    "keys: tensor": (
        lambda: theory.key_law(CLOUD, SAME),
        TypeError,
        "law must be a massieu.measures.Gaussian, got a tensor",
    ),
    "after: NaN": (lambda: theory.after_layer(LAW, LAW, NAN), ValueError, "step must be finite, got nan"),
    "after: tensor": (
        lambda: theory.after_layer(LAW, CLOUD, 1.0),
        TypeError,
        "keys must be a massieu.measures.Gaussian",
    ),
    "gain: tensor": (lambda: theory.entropy_gain(CLOUD, 1.0), TypeError, "keys must be a massieu.measures.Gaussian"),
    "whitened: tensor": (
        lambda: theory.whitened_map(CLOUD, LAW, 1.0),
        TypeError,
        "law must be a massieu.measures.Gaussian",
    ),
    "error: no key": (
        lambda: theory.sample_error(LAW, CLOUD, 0),
        ValueError,
        "count must be a whole number, at least 1, got 0",
    ),
    "report: NaN": (lambda: theory.equilibrium_report(CLOUD * NAN, SAME), ValueError, "particles must be finite"),
    "report: matrix": (lambda: theory.equilibrium_report(CLOUD, SAME * NAN), ValueError, "matrix must be finite"),
    "report: step": (lambda: theory.equilibrium_report(CLOUD, SAME, NAN), ValueError, "step must be finite, got nan"),
    "report: integers": (
        lambda: theory.equilibrium_report(CLOUD, SAME.long()),
        TypeError,
        "matrix must be .* got a tensor of torch.int64",
    ),
    "expansion: measure": (lambda: theory.expansion(3, CLOUD, 1.0), TypeError, "measure must be a .*Measure, got 3"),
    "expansion: list": (lambda: theory.expansion(LAW, [1.0], 1.0), TypeError, "points must be a floating-point tensor"),
    "alignment: NaN": (lambda: population.precision_alignment(SAME * NAN, SAME), ValueError, "score must be finite"),
    "alignment: covariance": (
        lambda: population.precision_alignment(SAME, SAME * NAN),
        ValueError,
        "covariance must be finite",
    ),
    "alignment: power": (
        lambda: population.precision_alignment(SAME, SAME, power=NAN),
        ValueError,
        "power must be finite",
    ),
    "alignment: draws": (
        lambda: population.precision_alignment(SAME, SAME, draws=2.5),
        TypeError,
        "draws must be a whole number",
    ),
    "alignment: integers": (
        lambda: population.precision_alignment(SAME.long(), SAME.long()),
        TypeError,
        "got a tensor of torch.int64",
    ),
    "growth: order": (
        lambda: theory.cumulant_growth(3.5, 1.0, 1.0),
        TypeError,
        "order must be a whole number, got 3.5",
    ),
    "growth: NaN": (lambda: theory.cumulant_growth(3, NAN, 1.0), ValueError, "step must be finite, got nan"),
    "measured growth": (
        lambda: theory.measured_cumulant_growth(3, 1.0, NAN),
        ValueError,
        "variance must be finite, got nan",
    ),
    "harmonics: dim": (
        lambda: theory.harmonic_growth(2, 1.0, 1.0, 2.5),
        TypeError,
        "dim must be a whole number, got 2.5",
    ),
    "harmonics: scale": (
        lambda: theory.harmonic_growth(1, 1.0, math.inf, 3),
        ValueError,
        "scale must be positive and finite, got inf",
    ),
    "renormalisation: NaN": (
        lambda: population.Renormalisation.create(SAME[0], SAME)(CLOUD * NAN),
        ValueError,
        "Renormalisation needs a finite covariance",
    ),
    "trace: NaN": (
        lambda: population.TraceRenormalisation.create(1.0)(CLOUD * NAN),
        ValueError,
        "a covariance of trace nan",
    ),
}


@every_row("case", CASES)
def test_one_sentence(case):
    call, error, named = CASES[case]
    with pytest.raises(error, match=named):
        call()
