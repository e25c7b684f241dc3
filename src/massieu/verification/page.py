"""The claims as one HTML page, written at once."""

from datetime import UTC, datetime
from pathlib import Path

import torch

import massieu
from massieu.errors import InputError
from massieu.report.writing import write_whole
from massieu.verification.run import Verification


def write_page(result: Verification, path: Path) -> Path:
    """Write the page beside its place, then move it there: an earlier page is replaced whole or not at all.

    Raises:
        InputError: it cannot be written there.
        MissingExtraError: jinja2 is not installed.
    """
    from massieu.report.claims import render

    if path.is_dir():
        raise InputError(f"{path} is a folder; the page needs the name of a file")
    claims = [
        claim.to_dict()
        | {
            "published_heading": claim.published_heading,
            "published_name": claim.published_name,
            "outcome": claim.outcome,
        }
        for claim in result
    ]
    now = datetime.now(UTC)
    made = {
        "massieu": massieu.__version__,
        "torch": torch.__version__,
        "date": f"{now.day} {now:%B %Y, %H:%M} UTC",
        "seconds": sum(claim.seconds for claim in result),
    }
    page = render(claims, result.summary, made)
    write_whole(path, page, "the page")
    return path
