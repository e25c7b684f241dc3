"""A statistic of every head as an array, against the rows of the table."""

import numpy as np
import polars
import pytest
from tests.support.report.synthetic_results import Results

from massieu.errors import InputError
from massieu.report.matrix import matrix_of
from massieu.report.tables import sites_of


@pytest.mark.parametrize(
    ("name", "error", "column"), [("encoder", False, "value"), ("encoder_decoder", True, "standard_error")]
)
def test_every_head_is_where_the_table_says(results: dict[str, Results], name: str, error: bool, column: str) -> None:
    result = results[name]
    sites = sites_of(result.run, result.heads)
    seen = 0
    for group in dict.fromkeys(site.group for site in sites):
        rows = [site for site in sites if site.group == group]
        found = matrix_of(result.run, result.heads, "entropy", error=error, attention=group)
        assert found.shape == (len(rows), max(row.heads for row in rows))
        for i, row in enumerate(rows):
            for head in range(found.shape[1]):
                here = result.heads.filter(
                    polars.col("site") == row.name, polars.col("head") == head, polars.col("statistic") == "entropy"
                )
                value = here[column][0] if len(here) else None
                assert (value is None and np.isnan(found[i, head])) or found[i, head] == value
                seen += value is not None
    assert seen == len(result.heads.filter(polars.col("statistic") == "entropy").drop_nulls(column)) > 0


def test_bad_names(results: dict[str, Results]) -> None:
    one = results["encoder"]
    pair = results["encoder_decoder"]
    with pytest.raises(InputError, match=r"no statistic 'entropi'; it has entropy"):
        matrix_of(one.run, one.heads, "entropi")
    with pytest.raises(InputError, match=r"attention must be one of '.*', '.*'; none was named"):
        matrix_of(pair.run, pair.heads, "entropy")
    with pytest.raises(InputError, match=r"attention must be one of .*; got 'sideways'"):
        matrix_of(one.run, one.heads, "entropy", attention="sideways")
