"""The claims as one HTML page: a table of all, then each with its numbers. It runs no script."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import massieu
from massieu.papers.claims.claim import Claim
from massieu.report.page import asset, template
from massieu.storage.writing import write_whole


def write_page(claims: Sequence[Claim], summary: str, path: Path) -> Path:
    """Write one self-contained HTML page; an earlier page is replaced whole or not at all.

    The page asks for nothing from outside; a content security policy forbids that and scripts. Every string is escaped.

    Raises:
        InputError: it cannot be written there.
        MissingExtraError: jinja2 is not installed.
    """
    now = datetime.now(UTC)
    page = template("claims.html.j2").render(
        claims=[_fields(claim) for claim in claims],
        summary=summary,
        made={
            "massieu": massieu.__version__,
            "torch": torch.__version__,
            "date": f"{now.day} {now:%B %Y, %H:%M} UTC",
            "seconds": sum(claim.seconds for claim in claims),
        },
        style=asset("page.css") + asset("claims.css"),
        holding=sum(claim.verdict == "holds" for claim in claims),
    )
    write_whole(path, page, "the page")
    return path


def _fields(claim: Claim) -> dict[str, Any]:
    """What the template reads of a claim."""
    return claim.to_dict() | {
        "published_heading": claim.published_heading,
        "published_name": claim.published_name,
        "outcome": claim.outcome,
    }
