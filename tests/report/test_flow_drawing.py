"""Small multiples of a flow: what is drawn where, escaped, and quiet in a browser."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from massieu.errors import InputError
from massieu.report.flow import Panel, draw, draw_flow

NONE = [[math.nan]] * 3


def panel(
    name: str, values: list[list[float]], errors: list[list[float]] = NONE, null: list[list[float]] = NONE
) -> Panel:
    return Panel(name, values, errors, null)


def heights(path: str) -> list[float]:
    """The second coordinate of each point."""
    return [float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def paths(html: str, mark: str) -> list[str]:
    return [path for path, attributes in re.findall(r'<path d="([^"]*)"([^>]*)>', html) if mark in attributes]


def test_a_number_is_a_line_with_its_band_and_its_null():
    drawing = draw([panel("spread", [[1.0], [2.0], [1.0]], [[0.1], [0.1], [0.1]], [[1.5], [1.5], [1.5]])], "title")
    (line,) = paths(drawing.html, 'stroke-width="2"')
    first, second, third = heights(line)
    assert first == third > second  # upwards is a smaller coordinate
    (null,) = paths(drawing.html, "stroke-dasharray")
    assert heights(null) == pytest.approx([(first + second) / 2] * 3, abs=0.11)
    (band,) = paths(drawing.html, "fill-opacity")
    around = heights(band)
    assert (around[0] + around[-1]) / 2 == pytest.approx(first, abs=0.11)
    assert around[-1] - around[0] == pytest.approx(0.4 * (first - second), abs=0.25)
    assert "layer 1: 2.00 ± 0.10; null: 1.50" in drawing.html


def test_a_vector_is_bands_from_quantile_to_quantile():
    rows = [[4.0, 3.0, 2.0, 1.0, 0.0]] * 2
    drawing = draw([Panel("spectrum", rows, [[math.nan] * 5] * 2, [[math.nan] * 5] * 2)], "title")
    outer, inner = (heights(path) for path in paths(drawing.html, "fill-opacity"))
    middle = heights(paths(drawing.html, 'stroke-width="2"')[0])[0]
    assert outer[0] < inner[0] < middle < inner[-1] < outer[-1]
    assert inner[-1] - inner[0] == pytest.approx((outer[-1] - outer[0]) / 2, abs=0.2)
    assert "5 entries: median, quartiles, extremes" in drawing.html
    assert "logarithmic" not in drawing.html
    wide = draw([Panel("spectrum", [[1e3, 1.0, 1e-3]] * 2, [[math.nan] * 3] * 2, [[math.nan] * 3] * 2)], "title")
    assert "logarithmic" in wide.html


@pytest.mark.parametrize(
    "values",
    [
        [[1.0]],
        [[0.0], [0.0]],
        [[math.nan], [math.nan]],
        [[math.inf], [1.0]],
        [[1.0], [math.nan], [-1e30]],
        [[7e-9], [7e-9]],
    ],
)
def test_degenerate_numbers_are_drawn(values: list[list[float]]):
    none = [[math.nan]] * len(values)
    html = draw([Panel("odd", values, none, none)], "title").html
    assert "nan" not in html and "inf" not in html
    inside = [float(y) for y in re.findall(r'cy="([\d.-]+)"', html)]
    assert all(0 <= y <= 170 for y in inside)
    assert len(inside) == sum(math.isfinite(value) for (value,) in values)


def test_a_line_is_interrupted_where_nothing_is_known():
    line = paths(draw([panel("gap", [[1.0], [math.nan], [2.0]])], "title").html, 'stroke-width="2"')[0]
    assert line.count("M") == 2 and "L" not in line


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)


def test_names_are_escaped_and_nothing_runs(tmp_path: Path):
    drawing = draw([panel("<script>alert(1)</script>", [[1.0], [2.0], [3.0]])], 'a "title" <b>')
    path = drawing.save(tmp_path / "new" / "page.html")
    page = _Tags()
    page.feed(path.read_text())
    assert not {"script", "b", "img", "link"} & set(page.tags)
    assert drawing._repr_html_() == drawing.html
    assert "default-src 'none'" in path.read_text()
    with pytest.raises(InputError, match="is a folder; the drawing needs"):
        drawing.save(tmp_path / "new")
    with pytest.raises(InputError, match="nothing to draw"):
        draw([], "title")


def test_a_flow_is_drawn_by_its_observables():
    import torch

    from massieu.population import CloudMoments, Flow

    result = Flow(lambda x: x / 2, depth=2, observables=[CloudMoments()]).run(torch.randn(9, 3), progress=False)
    assert draw_flow(result).html.count("<svg") == 6
    html = draw_flow(result, ["log_determinant"], title="one").html
    assert html.count("<svg") == 1
    assert "log determinant" in html
    with pytest.raises(InputError, match="no observable 'nothing'"):
        draw_flow(result, ["nothing"])
    with pytest.raises(InputError, match="flow must be a FlowResult, got 3"):
        draw_flow(3)  # pyright: ignore[reportArgumentType]
