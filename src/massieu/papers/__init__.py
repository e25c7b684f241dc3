"""The papers: what is proved as functions, each claim checked with numbers, and small experiments with a known truth.

- `theory`: bounds, laws and exactly solved models of attention in ideal cases;
- `verify` or the command ``massieu verify``: every claim of the papers, each with its number and its bound, a `Claim`;
- ``massieu experiment``: small models trained where the truth is known, each with a verdict.

Importing this package loads no torch; names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from massieu.foundation.lazy_names import lazy_names

if TYPE_CHECKING:
    from massieu.papers import theory
    from massieu.papers.claims.claim import Claim
    from massieu.papers.claims.run import verify

__all__ = ["Claim", "theory", "verify"]

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "Claim": "massieu.papers.claims.claim:Claim",
        "theory": "massieu.papers.theory",
        "verify": "massieu.papers.claims.run:verify",
    },
)
