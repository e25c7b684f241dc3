"""The names of the files of a stored result and of a stored comparison."""

FORMATS = ("parquet", "csv")
"""Formats of the tables."""
TABLES = ("heads", "layers")
PAGE = "report.html"
TOKENS = "tokens"
"""The folder of the per-token table's parts."""
TOKEN_PARTS = f"{TOKENS}/part-*.parquet"
"""The pattern of the names of these parts."""
RECORD = "run.json"
DETAILS = "details.json"
UNITS = "units.safetensors"
COMPARISON_RECORD = "comparison.json"
DIFFERENCES = "differences.parquet"
VALUES = "values.parquet"
COMPARISON_FILES = (DIFFERENCES, VALUES, PAGE)
"""The files of a comparison, without its record."""


def files_of(format: str, per_token: bool) -> tuple[str, ...]:
    """The names, or patterns of them, of the files that a result will have, without the record."""
    names = [*(f"{name}.{format}" for name in TABLES), DETAILS, UNITS, PAGE]
    if per_token:
        names.append(TOKEN_PARTS)
    return tuple(names)
