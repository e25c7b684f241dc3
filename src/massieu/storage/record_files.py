"""The names of the files of a stored result and of a stored comparison."""

FORMATS = ("parquet", "csv")
TABLES = ("heads", "layers")
PAGE = "report.html"
TOKENS = "tokens"
"""The folder that parts are in."""
TOKEN_PARTS = f"{TOKENS}/part-*.parquet"
"""The names of all parts that a result may have."""
RECORD, DETAILS, UNITS = "run.json", "details.json", "units.safetensors"
COMPARISON_RECORD = "comparison.json"
DIFFERENCES, VALUES = "differences.parquet", "values.parquet"
COMPARISON_FILES = (DIFFERENCES, VALUES, PAGE)
"""Beside the record."""


def files_of(format: str, per_token: bool) -> tuple[str, ...]:
    """The names, or patterns of them, that the files of a result will have, beside the record."""
    tables = (f"{name}.{format}" for name in TABLES)
    return (*tables, DETAILS, UNITS, PAGE, *((TOKEN_PARTS,) if per_token else ()))
