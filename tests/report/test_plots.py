"""Figures of a result, by plotly and in axes of matplotlib, against the tables and the record that they are drawn from."""

import sys
from typing import Any

import numpy as np
import polars
import pytest
from matplotlib.figure import Figure
from tests.support.report.synthetic_results import Results

from massieu.errors import InputError, MissingExtraError
from massieu.report.matrix import matrix_of
from massieu.report.plots import ResultPlots


@pytest.fixture(params=["encoder", "large", "encoder_decoder", "hostile"])
def kind(request: Any) -> str:
    return request.param


def plots_of(results: dict[str, Results], kind: str = "encoder") -> ResultPlots:
    return ResultPlots(*results[kind])


def test_the_map_has_the_numbers_of_the_table(results: dict[str, Results]) -> None:
    result = results["encoder"]
    plot = plots_of(results)
    drawn = plot.map("own_write_sharpens").data[0]
    expected = matrix_of(result.run, result.heads, "own_write_sharpens")
    np.testing.assert_array_equal(np.array(drawn.z, dtype=float), expected)
    assert drawn.zmin == -drawn.zmax == -np.nanmax(np.abs(expected))  # signed: 0 is in the middle
    entropy = plot("entropy")  # the same as map
    assert entropy.data[0].zmin is None and entropy.layout.title.text == "Entropy"


def test_the_map_in_axes_is_the_same(results: dict[str, Results]) -> None:
    result = results["encoder"]
    ax = Figure().subplots()
    assert plots_of(results).map("own_write_sharpens", ax=ax) is ax
    (image,) = ax.images
    expected = matrix_of(result.run, result.heads, "own_write_sharpens")
    np.testing.assert_array_equal(image.get_array().filled(np.nan), expected)
    low, high = image.get_clim()
    assert low == -high == -np.nanmax(np.abs(expected))


def test_a_head_has_its_distributions(results: dict[str, Results]) -> None:
    result = results["encoder"]
    figure = plots_of(results).head(2, 1)
    histograms = result.details["histograms"]
    assert len(figure.data) == len(histograms)
    site = next(site.index for site in result.run.sites if site.layer == 2)
    for bars, (name, histogram) in zip(figure.data, histograms.items(), strict=True):
        counts = np.array(histogram["counts"][str(site)][1])
        np.testing.assert_allclose(bars.y, 100 * counts / counts.sum(), rtol=1e-15)
        ax = Figure().subplots()
        plots_of(results).head(2, 1, name, ax=ax)
        np.testing.assert_allclose([bar.get_height() for bar in ax.patches], bars.y, rtol=1e-15)


def test_the_depth_joins_before_to_after_and_has_the_control(results: dict[str, Results]) -> None:
    result = results["encoder"]
    figure = plots_of(results).depth()
    values = {
        (site, name): value
        for site, name, value in result.layers.select("site", "statistic", "value").iter_rows()
        if value is not None
    }
    names = [sublayer.name for sublayer in result.run.sublayers]
    lines = {trace.legendgroup: trace for trace in figure.data if trace.mode == "lines"}
    for kind in {sublayer.kind for sublayer in result.run.sublayers}:
        places = [sublayer.index for sublayer in result.run.sublayers if sublayer.kind == kind]
        drawn = np.array(lines[kind].y, dtype=float).reshape(-1, 3)
        for column, name in enumerate(("before", "after")):
            expected = [values.get((names[place], f"pairwise_distance/{name}"), np.nan) for place in places]
            np.testing.assert_array_equal(drawn[:, column], expected)
    control = figure.data[-1]
    expected = [values.get((name, "pairwise_distance_log_ratio/reinitialised"), np.nan) for name in names]
    np.testing.assert_array_equal(np.array(control.y, dtype=float), expected)
    level, change = Figure().subplots(2)
    plots_of(results).depth(ax=(level, change))
    np.testing.assert_array_equal(change.containers[-1].lines[0].get_ydata(), expected)


@pytest.mark.medium
def test_every_kind_of_result_can_be_drawn(results: dict[str, Results], kind: str) -> None:
    result = results[kind]
    plot = plots_of(results, kind)
    attention = _attention(result)
    statistic = result.heads["statistic"][0]
    drawn = Figure()
    panels = drawn.subplots(2, 2).ravel()
    plot.map(statistic, attention=attention).to_json()
    plot.map(statistic, attention=attention, ax=panels[0])
    name = next(iter(result.details["histograms"]))
    plot.head(0, 0, attention=attention).to_json()
    plot.head(0, 0, name, attention=attention, ax=panels[1])
    plot.depth().to_json()
    plot.depth(ax=panels[2:])
    drawn.savefig("/dev/null", format="png")


def _attention(result: Results) -> str | None:
    from massieu.report.tables import sites_of

    groups = list(dict.fromkeys(site.group for site in sites_of(result.run, result.heads)))
    return groups[0] if len(groups) > 1 else None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda plot: plot.map("entropi"), "no statistic 'entropi'; it has entropy"),
        (lambda plot: plot.map(3), "statistic must be a string, got 3"),
        (lambda plot: plot.map("entropy", ax=3), "ax must be an Axes, got 3"),
        (lambda plot: plot.head(0, 99), "layer 0 has no head 99"),
        (lambda plot: plot.head(True, 0), "layer must be a whole number, got True"),
        (lambda plot: plot.head(0, 0, "rank"), "has no distribution of 'rank'; it has"),
        (lambda plot: plot.head(0, 0, ax=Figure().subplots()), "axes hold one distribution; name one with statistic="),
        (lambda plot: plot.depth("entropy"), "no quantity 'entropy' through the depth; it has pairwise_distance"),
        (lambda plot: plot.depth(ax=[]), "ax must be axes for the level, or two for level and change, got 0"),
        (lambda plot: plot.depth(ax="a"), "ax must be an Axes, got 'a'"),
    ],
)
def test_bad_input(results: dict[str, Results], wrong: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        wrong(plots_of(results))


def test_a_result_without_numbers_says_what_to_measure(results: dict[str, Results]) -> None:
    result = results["encoder"]
    plot = ResultPlots(result.run, {}, result.heads, result.layers.clear())
    with pytest.raises(
        InputError, match=r"keeps no distribution of layer 0, head 0; probe with statistics=\['attention'\]"
    ):
        plot.head(0, 0)
    with pytest.raises(InputError, match=r"it has none: probe with statistics=\['expansion'\]"):
        plot.depth()


def test_a_statistic_without_a_number_is_drawn(results: dict[str, Results]) -> None:
    result = results["encoder"]
    heads = result.heads.with_columns(polars.lit(None, dtype=polars.Float64).alias("value"))
    plot = ResultPlots(result.run, result.details, heads, result.layers)
    plot.map("entropy").to_json()
    ax = Figure().subplots()
    plot.map("own_write_sharpens", ax=ax)
    ax.figure.savefig("/dev/null", format="png")


@pytest.mark.parametrize("module", ["plotly", "matplotlib"])
def test_what_is_missing_is_named(results: dict[str, Results], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ax = Figure().subplots()
    for name in ("plotly", "plotly.graph_objects", "plotly.subplots", "matplotlib", "matplotlib.colors"):
        if name.startswith(module):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingExtraError, match=rf'^{module} is not installed; install it with: pip install "massieu\[probe\]"'
    ):
        plots_of(results).map("entropy", ax=ax if module == "matplotlib" else None)
