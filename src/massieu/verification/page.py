"""The claims as one HTML page, written at once."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import massieu
from massieu.report.writing import write_whole
from massieu.verification.claim import Claim


def write_page(claims: Sequence[Claim], summary: str, path: Path) -> Path:
    """Write the page beside its place, then move it there: an earlier page is replaced whole or not at all.

    Raises:
        InputError: it cannot be written there.
        MissingExtraError: jinja2 is not installed.
    """
    from massieu.report.claims import render

    shown = [
        claim.to_dict()
        | {
            "published_heading": claim.published_heading,
            "published_name": claim.published_name,
            "outcome": claim.outcome,
        }
        for claim in claims
    ]
    now = datetime.now(UTC)
    made = {
        "massieu": massieu.__version__,
        "torch": torch.__version__,
        "date": f"{now.day} {now:%B %Y, %H:%M} UTC",
        "seconds": sum(claim.seconds for claim in claims),
    }
    write_whole(path, render(shown, summary, made), "the page")
    return path
