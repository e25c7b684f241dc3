"""Flows: what is recorded, checkpoints, interruptions, and what each refuses."""

import signal
import subprocess
import sys
from pathlib import Path

import polars
import pytest
import torch
from tests.support.population import killed_flow
from tests.support.rows import every_row

from massieu import ops
from massieu.errors import InputError
from massieu.foundation.settings import fingerprint
from massieu.papers.theory import ClusteringEnergy
from massieu.population import (
    CloudMoments,
    CloudShape,
    Clusters,
    DoublyStochasticLayer,
    Flow,
    ObservableReading,
    ResampledLayer,
    SelfAttention,
    covariance_spectrum,
    log_determinant,
)


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def halve(points):
    return points / 2


def resampled(seed=5, scale=0.3):
    return ResampledLayer.create(
        generator=torch.Generator().manual_seed(seed), scale=scale, step_size=0.4, residual=True
    )


def noisy(generator):
    def layer(points):
        return points + 0.1 * torch.randn(points.shape, generator=generator, dtype=points.dtype)

    return layer


def assert_same(one, other):
    """Bit for bit."""
    assert repr(one.rows) == repr(other.rows)
    assert torch.equal(one.particles, other.particles)
    assert (one.lineage is None) == (other.lineage is None)
    assert one.lineage is None or torch.equal(one.lineage, other.lineage)
    assert (one.layers, one.complete) == (other.layers, other.complete)


def test_what_is_recorded():
    points = draws(20, 3)
    readings = [
        lambda x: {"spread": x.std(), "first": ObservableReading(x[0], torch.ones(3), torch.tensor(7.0))},
        lambda x: {"tokens": len(x)},
    ]
    result = Flow(halve, depth=2, observables=readings).run(points)
    assert result.complete
    assert result.layers == 2
    assert result.observables == ("spread", "first", "tokens")
    torch.testing.assert_close(result.values("spread"), points.std() / torch.tensor([1.0, 2, 4], dtype=torch.float64))
    torch.testing.assert_close(result.values("first")[2], points[0] / 4)
    assert (result.standard_errors("first") == 1).all()
    assert (result.nulls("first") == 7).all()
    assert result.nulls("spread").isnan().all()
    assert torch.equal(result.particles, points / 4)
    spread = points.std()
    assert f"<tr><td>spread</td><td>{spread:.4g}</td><td>{spread / 4:.4g}</td></tr>" in result._repr_html_()
    assert "<td>first</td>" not in result._repr_html_()  # vectors are in the table alone
    frame = result.table
    assert frame.columns == ["layer", "observable", "index", "value", "standard_error", "null"]
    assert len(frame) == 3 * 5
    row = frame.filter((polars.col("layer") == 1) & (polars.col("observable") == "first") & (polars.col("index") == 2))
    assert row["value"].to_list() == [points[0, 2].item() / 2]
    assert frame.filter(polars.col("observable") == "spread")["index"].to_list() == [None] * 3
    with pytest.raises(InputError, match="no observable 'depth' in this flow; it recorded spread, first, tokens"):
        result.values("depth")


def test_several_layers_and_an_observable_that_some_lack():
    def widen(points):
        return torch.cat([points, points[:, :1]], -1)

    result = Flow([halve, widen, resampled()], observables=[CloudMoments()]).run(draws(12, 2).float())
    assert result.particles.shape == (12, 3)
    assert result.particles.dtype == torch.float32
    spectrum = result.values("covariance_spectrum")
    assert spectrum[:2, 2].isnan().all()  # two eigenvalues
    assert spectrum[2, 2].isfinite()
    assert result.values("effective_size").isnan().tolist() == [True, True, True, False]


@pytest.mark.medium
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_resumed_is_uninterrupted(tmp_path, stop):
    """Random layers go on where their generators were; those of another kind too."""
    points = draws(30, 4)

    def built():
        generator = torch.Generator().manual_seed(3)
        calls = [noisy(generator), resampled(), noisy(generator), resampled(6)]
        return Flow(calls, observables=[CloudMoments(), CloudShape(projections=8)], generators=[generator])

    whole = built().run(points)
    cut = built()
    layers = list(cut.layers)

    class CutError(Exception):
        pass

    def broken(points):
        raise CutError

    if stop < 4:
        cut.layers = (*layers[:stop], broken, *layers[stop + 1 :])
        with pytest.raises(CutError):
            cut.run(points, checkpoint=tmp_path / "flow")
        # The flow that failed is another than that which goes on: only the broken layer differs.
        with pytest.raises(InputError, match="checkpoint of another flow: layers differ"):
            built().resume(tmp_path / "flow")
        return
    assert_same(cut.run(points, checkpoint=tmp_path / "flow"), whole)
    assert_same(built().resume(tmp_path / "flow"), whole)  # nothing is left to be done


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(tmp_path):
    """A process that is killed in its fourth layer, and another that goes on."""
    arguments = [sys.executable, "-m", "tests.support.population.killed_flow", str(tmp_path / "flow")]
    killed = subprocess.run(arguments, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in (tmp_path / "flow").iterdir()] == ["process-00000-layer-00003.safetensors"]
    result = killed_flow.build().resume(tmp_path / "flow")
    assert result.layers == 6
    assert_same(result, killed_flow.build().run(killed_flow.cloud()))


def test_interrupted_it_keeps_what_it_has(tmp_path):
    calls = []

    def interrupted(points):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return points / 2

    flow = Flow(interrupted, depth=5, observables=[CloudMoments()])
    result = flow.run(draws(9, 2), progress=False)
    assert not result.complete
    assert result.layers == 2
    assert torch.equal(result.particles, draws(9, 2) / 4)
    assert len(result.values("length")) == 3


def test_a_checkpoint_of_another_flow_is_refused(tmp_path):
    points = draws(10, 2)
    folder = tmp_path / "flow"
    Flow(resampled(), depth=2).run(points, checkpoint=folder)
    for other, what in (
        (Flow(resampled(), depth=3), "depth and layers"),
        (Flow(resampled(scale=0.31), depth=2), "layers"),
        (Flow(resampled(), depth=2, observables=[CloudMoments()]), "observables"),
        (Flow(resampled(), depth=2, generators=[torch.Generator()]), "generators"),
    ):
        with pytest.raises(InputError, match=f"has a checkpoint of another flow: {what} differ from this one's"):
            other.resume(folder)
    with pytest.raises(InputError, match="has a checkpoint already: resume it, or name another folder"):
        Flow(resampled(), depth=2).run(points, checkpoint=folder)
    with pytest.raises(InputError, match="has no checkpoint of a flow"):
        Flow(resampled(), depth=2).resume(tmp_path / "nowhere")
    (path,) = folder.iterdir()
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="is damaged or no checkpoint of a flow"):
        Flow(resampled(), depth=2).resume(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the checkpoint"):
        Flow(resampled(), depth=2).run(points, checkpoint=tmp_path / "file")


def scaled_by(number):
    def layer(x, *, factor=number):
        return factor * x

    return layer


def attending(heads):
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(4, heads)


@every_row(
    ("one", "other"),
    [
        (attending(1), attending(2)),
        (lambda x: x * 2, lambda x: x * 3),
        (ClusteringEnergy.create(1.0).step, ClusteringEnergy.create(2.0).step),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        (noisy(torch.Generator()), resampled()),
        (scaled_by(2), scaled_by(3)),
    ],
)
def test_layers_with_other_content_have_other_fingerprints(one, other):
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_bad_calls():
    for layers, options, error, message in (
        ([], {}, ValueError, "at least one layer"),
        (halve, {}, ValueError, "one layer needs depth="),
        ([halve], {"depth": 2}, ValueError, "depth says how often one layer is applied"),
        (halve, {"depth": 0}, ValueError, "depth must be a whole number"),
        ([3], {}, TypeError, "must be callable, got int"),
        (halve, {"depth": 1, "generators": [3]}, TypeError, "torch.Generator, got 3"),
    ):
        with pytest.raises(error, match=message):
            Flow(layers, **options)
    with pytest.raises(ValueError, match=r"particles must have shape \(n, d\), got \(2, 9, 2\)"):
        Flow(halve, depth=1).run(draws(2, 9, 2))
    with pytest.raises(ValueError, match=r"layer 1 must return particles \(9, d\), got \(8, 2\)"):
        Flow(lambda x: x[1:], depth=1).run(draws(9, 2))
    with pytest.raises(ValueError, match=r"layer 1 must return particles .* got None"):
        Flow(lambda x: None, depth=1).run(draws(9, 2))
    with pytest.raises(ValueError, match="names of their own, got length twice"):
        Flow(halve, depth=1, observables=[CloudMoments(), lambda x: {"length": 1.0}]).run(draws(9, 2))
    with pytest.raises(ValueError, match=r"a number or a vector; points has shape \(9, 2\)"):
        Flow(halve, depth=1, observables=[lambda x: {"points": x}]).run(draws(9, 2))
    with pytest.raises(ValueError, match="CloudShape needs at least 4 tokens, got 3"):
        Flow(halve, depth=1).run(draws(3, 2))


def test_trap_17_ascent_lowers_the_entropy_of_attention_and_raises_that_of_the_population():
    def ascend(points):
        heads = points[None, None]
        return points + 0.5 * ops.attention(heads, heads, heads, scale=1.0).output[0, 0]

    result = Flow(ascend, depth=6, observables=[CloudMoments(), SelfAttention(1.0)]).run(draws(200, 3))
    assert (result.values("attention_entropy").diff() < 0).all()
    assert (result.values("log_determinant").diff() > 0).all()
    expected = log_determinant(covariance_spectrum(result.particles))
    torch.testing.assert_close(result.values("log_determinant")[-1], expected)


@pytest.mark.medium
def test_tokens_on_a_sphere_end_in_one_cluster_unless_the_mean_is_kept():
    points = torch.nn.functional.normalize(draws(60, 4), dim=-1)
    observables = [Clusters(), SelfAttention(2.0)]
    result = Flow(ClusteringEnergy.create(2.0).step, depth=60, observables=observables).run(points)
    assert result.values("clusters")[0] > 20
    assert result.values("clusters")[-1] == 1
    assert (result.values("log_interaction_energy").diff() >= -1e-12).all()
    centred = Flow(DoublyStochasticLayer.create(scale=2.0), depth=3, observables=[CloudMoments()]).run(points)
    mean = centred.values("length_of_mean")
    torch.testing.assert_close(mean, mean[:1].expand(4), atol=1e-10, rtol=0)


MEMORY = """
import resource, torch
from massieu.population import CloudMoments, CloudShape, Clusters, Flow
points = torch.randn(100_000, 64)
observables = [CloudMoments(), CloudShape(projections=16), Clusters(limit=4)]
used = []
for depth, tokens in ((2, 1000), (1, 100_000), (5, 100_000)):
    Flow(lambda x: x * 1.01, depth=depth, observables=observables).run(points[:tokens])
    used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(used[1] - used[0], used[2] - used[0])
"""


@pytest.mark.slow
def test_a_hundred_thousand_tokens_in_linear_memory():
    printed = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
    shallow, deep = map(float, printed.split())
    cloud = 100_000 * 64 * 8 / 2**20  # MiB, in float64
    assert deep < 12 * cloud  # all pairs of tokens would be 76,000
    assert deep < shallow + 4 * cloud / 2 * 0.75  # not even the four clouds in float32 more
