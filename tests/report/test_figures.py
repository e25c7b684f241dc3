"""The fragments for a notebook: complete, escaped, without scripts; bad names give one clear sentence."""

import re
import xml.etree.ElementTree as ElementTree

import polars
import pytest
from tests.support.report.synthetic_results import HOSTILE, Results

from massieu.errors import InputError
from massieu.foundation.numbers import number
from massieu.report.colours import DIVERGING, SEQUENTIAL
from massieu.report.figures import head_html, head_map_html

SVG = "{http://www.w3.org/2000/svg}"


def svg_of(fragment: str) -> ElementTree.Element:
    match = re.search(r"<svg.*?</svg>", fragment, re.DOTALL)
    assert match
    return ElementTree.fromstring(match[0].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))


def test_the_map_has_one_cell_per_head_and_hatches_those_inside_their_null(results: dict[str, Results]) -> None:
    result = results["encoder"]
    svg = svg_of(head_map_html(result.run, result.heads, "own_write_sharpens"))
    titles = [title.text or "" for title in svg.iter(f"{SVG}title")]
    assert len(titles) == 72
    tested = result.heads.filter(polars.col("statistic") == "own_write_sharpens/q_value")
    inside = int((tested["value"] >= 0.05).sum())
    assert sum("does not differ from its control" in title for title in titles) == inside
    assert len(list(svg.iter(f"{SVG}path"))) == 2 * inside


def test_the_least_and_the_largest_head_have_the_ends_of_the_scale(results: dict[str, Results]) -> None:
    result = results["encoder"]
    for name, scale in (("entropy", SEQUENTIAL), ("own_write_sharpens", DIVERGING["light"])):
        rows = result.heads.filter(polars.col("statistic") == name)
        cells = list(svg_of(head_map_html(result.run, result.heads, name)).iter(f"{SVG}rect"))
        values = dict(zip(zip(rows["site"], rows["head"], strict=True), rows["value"], strict=True))
        order = [(site.name, head) for site in result.run.sites for head in range(site.heads)]
        fills = {key: cell.get("fill") for key, cell in zip(order, cells[-len(order) :], strict=True)}
        if scale is SEQUENTIAL:
            assert fills[min(values, key=values.__getitem__)] == scale[0]
            assert fills[max(values, key=values.__getitem__)] == scale[-1]
        else:
            centre = result.heads.filter(polars.col("statistic") == f"{name}/mismatched")["value"].median()
            farthest = max(values, key=lambda key: abs(values[key] - centre))
            assert fills[farthest] == (scale[-1] if values[farthest] > centre else scale[0])


def test_the_map_stands_beside_the_findings(results: dict[str, Results]) -> None:
    result = results["encoder"]
    fragment = head_map_html(result.run, result.heads, "selective_log_partition")
    for finding in result.run.findings:
        assert finding.sentence in fragment
        assert finding.caveat in fragment
    assert "<script" not in fragment


def test_the_bars_at_both_ends_are_open(results: dict[str, Results]) -> None:
    result = results["encoder"]
    fragment = head_html(result.run, result.details, result.heads, 0, 0)
    for histogram in result.details["histograms"].values():
        _, low, *_, high, _ = histogram["edges"]
        assert f"<title>{number(low)} or less: " in fragment
        assert f"<title>{number(high)} or more: " in fragment


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["encoder_decoder", "bare", "hostile"])
def test_any_result_gives_fragments_without_live_markup(kind: str, results: dict[str, Results]) -> None:
    result = results[kind]
    fragment = head_map_html(result.run, result.heads, "entropy")
    fragment += head_html(result.run, result.details, result.heads, 0, 0)
    for part in ("<script", "<img", "onerror=window.hacked=1>"):
        assert part not in fragment.replace("&gt;", ">") or part == "onerror=window.hacked=1>"
    assert HOSTILE[0] not in fragment
    svg_of(fragment)


def test_a_head_is_shown_at_every_site_of_its_layer(results: dict[str, Results]) -> None:
    result = results["encoder_decoder"]
    fragment = head_html(result.run, result.details, result.heads, 1, 2)
    for name in ("encoder.block.1.self_attn", "decoder.block.1.self_attn", "decoder.block.1.encoder_attn"):
        assert name in fragment
    entry = result.details["examples"][0]["sites"]["0"]
    weight = 100 * entry["top_weights"][2][0][0]
    assert f"{weight:.1f} %" in head_html(result.run, result.details, result.heads, 0, 2)


def test_wrong_names_are_answered_in_one_sentence(results: dict[str, Results]) -> None:
    result = results["encoder"]
    with pytest.raises(InputError, match=r"no statistic named 'entrpy'.*it has: selective_log_partition"):
        head_map_html(result.run, result.heads, "entrpy")
    with pytest.raises(InputError, match="no layer 6 in this result; its layers are: 0, 1, 2, 3, 4, 5"):
        head_html(result.run, result.details, result.heads, 6, 0)
    with pytest.raises(InputError, match="layer 2 has heads 0 to 11, not 12"):
        head_html(result.run, result.details, result.heads, 2, 12)
