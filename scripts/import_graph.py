"""Which room imports which, as a picture in docs/images/imports.svg: ``python -m scripts.import_graph``.

``--out FILE`` writes it elsewhere, such as a picture of the state before a change. Rooms stand in the columns of their wings,
each above all that it imports. A line that follows from others is left out: if nn imports energy and energy imports measures,
none is drawn from nn to measures. A line from the core to another wing would be red.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path

from tests.support.rooms import files, imports, room_of_file, wing_of

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "imports.svg"

Graph = Mapping[str, set[str]]
"""For each room the rooms that it imports."""

LEFT_OUT = {"__init__", "__main__", "papers"}
"""The lists of names, which import what they show."""
COLUMNS = {"papers": (10, 250), "core": (275, 505), "probe": (795, 195)}
"""The left edge and the width of each wing."""
COLOURS = {"papers": "#b5651d", "core": "#2a6f97", "probe": "#3a7d44", None: "#555555"}
WIDTH, ROW, TOP = 1000, 64, 30
BOX_WIDTH, BOX_HEIGHT = 96, 28
SHIFT = 60
"""How far rows of one or two boxes are moved, so that a line between two rows passes beside the boxes between them."""
UPWARDS = "#c1121f"


def room_imports() -> dict[str, set[str]]:
    """The imports between rooms, of all files; rooms within `probing` count as one."""
    graph: dict[str, set[str]] = defaultdict(set)
    for path in files():
        room = _drawn_room(room_of_file(path))
        graph[room] |= {_drawn_room(each.room) for each in imports(path)} - {room}
    return {room: others - LEFT_OUT for room, others in sorted(graph.items()) if room not in LEFT_OUT}


def _drawn_room(room: str) -> str:
    return "probing" if room.startswith("probing.") else room


def reachable(graph: Graph) -> dict[str, set[str]]:
    """For each room all rooms that it imports, by others too."""
    reached: dict[str, set[str]] = {}

    def visit(room: str) -> set[str]:
        if room not in reached:
            reached[room] = graph[room].union(*map(visit, graph[room]))
        return reached[room]

    for room in graph:
        visit(room)
    return reached


def without_shortcuts(graph: Graph) -> dict[str, set[str]]:
    """The graph without the imports that follow from others."""
    reached = reachable(graph)
    return {room: others - set().union(*(reached[other] for other in others)) for room, others in graph.items()}


def heights(graph: Graph) -> dict[str, int]:
    """How many rows a room stands above the lowest: one more than the highest room that it imports."""
    known: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in known:
            known[room] = 1 + max(map(height, graph[room]), default=-1)
        return known[room]

    return {room: height(room) for room in graph}


def places(graph: Graph) -> dict[str, tuple[int, int]]:
    """The middle of each room's box, in pixels."""
    rows = heights(graph)
    highest = max(rows.values())
    in_row: dict[tuple[str | None, int], list[str]] = defaultdict(list)
    for room in sorted(graph):
        in_row[wing_of(room), rows[room]].append(room)
    found = {}
    for (wing, row), rooms in in_row.items():
        left, width = COLUMNS[wing] if wing is not None else (0, WIDTH)
        if wing == "core" and len(rooms) < 3:
            left += SHIFT * (row % 3 - 1)
        for number, room in enumerate(rooms):
            across = left + width * (2 * number + 1) // (2 * len(rooms))
            found[room] = across, TOP + ROW * (highest - row)
    return found


def picture(graph: Graph) -> str:
    """The picture, as SVG."""
    place = places(graph)
    bottom = max(down for _, down in place.values()) + ROW // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 20}" font-family="sans-serif" '
        'font-size="13" text-anchor="middle">',
        "<title>Which room imports which</title>",
        f'<rect width="{WIDTH}" height="{bottom + 20}" fill="white"/>',
    ]
    for wing, (left, width) in COLUMNS.items():
        parts.append(
            f'<rect x="{left}" y="{TOP + ROW // 2}" width="{width}" height="{bottom - TOP - ROW // 2}" rx="8" '
            f'fill="{COLOURS[wing]}" fill-opacity="0.08"/>'
        )
        parts.append(
            f'<text x="{left + width // 2}" y="{bottom + 14}" fill="{COLOURS[wing]}" font-weight="bold">{wing}</text>'
        )
    for room, others in without_shortcuts(graph).items():
        parts += [_line(room, other, place) for other in sorted(others)]
    parts += [_box(room, *place[room]) for room in sorted(graph)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(room: str, other: str, place: Mapping[str, tuple[int, int]]) -> str:
    (x, y), (to_x, to_y) = place[room], place[other]
    y, to_y = y + BOX_HEIGHT // 2, to_y - BOX_HEIGHT // 2
    middle = (y + to_y) // 2
    out_of_the_core = wing_of(room) == "core" and wing_of(other) != "core"
    colour = UPWARDS if out_of_the_core else COLOURS[wing_of(room)]
    return (
        f'<path d="M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}" fill="none" stroke="{colour}" '
        f'stroke-width="{3 if out_of_the_core else 1.2}" stroke-opacity="0.7">'
        f"<title>{escape(room)} imports {escape(other)}</title></path>"
    )


def _box(room: str, x: int, y: int) -> str:
    colour = COLOURS[wing_of(room)]
    name = room.rpartition(".")[2]
    return (
        f'<rect x="{x - BOX_WIDTH // 2}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
        f'fill="white" stroke="{colour}"/><text x="{x}" y="{y + 4}" fill="{colour}">{escape(name)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE")
    out = parser.parse_args().out
    out.write_text(picture(room_imports()), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
