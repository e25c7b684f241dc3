"""The page of checked claims: a table of all, then each with its numbers. One HTML file without scripts."""

from typing import Any

from massieu.report.page import asset, template


def render(claims: list[dict[str, Any]], summary: str, made: dict[str, Any]) -> str:
    """Draw checked claims as one self-contained HTML page.

    The page asks for nothing from outside and runs no script; a content security policy forbids both. Every string is
    escaped.

    Args:
        claims: What ``massieu verify --json`` prints, each with ``published_heading`` and ``published_name``, which
            introduce the form that is false, and ``outcome``, which says what became of it.
        summary: How many claims hold, in one line.
        made: ``massieu`` and ``torch`` (versions), ``date``, ``seconds``.

    Returns:
        The HTML text, to be written as UTF-8.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    style = asset("page.css") + asset("claims.css")
    holding = sum(claim["verdict"] == "holds" for claim in claims)
    return template("claims.html.j2").render(claims=claims, summary=summary, made=made, style=style, holding=holding)
