"""Long tables as arrays, one entry for each head of the map."""

import numpy as np
import polars

from massieu.probing.result.long_table import TableBuilder, schema
from massieu.report.tables import columns_of


def test_rows_find_their_cells_whatever_their_order():
    generator = np.random.default_rng(0)
    # A statistic has one row for each place, in any order; some places are on no map, and head −1 stands for none.
    places = [(f"site {site}", None if head < 0 else head) for site in range(3) for head in range(-1, 6)]
    rows = [
        (site, 0, head, statistic, generator.normal(), None, 1)
        for statistic in ("entropy", "log_partition")
        for site, head in (places[place] for place in generator.permutation(len(places)))
    ]
    table = polars.DataFrame(rows, schema=schema(), orient="row")
    cells = {("site 0", 0): 3, ("site 0", 5): 0, ("site 1", None): 1, ("site 9", 2): 2, ("site 2", 2): 4}
    columns = columns_of(table, cells, 5)
    assert list(columns) == list(dict.fromkeys(row[3] for row in rows))
    for name, column in columns.items():
        by_hand = np.full(5, np.nan)
        for site, _, head, statistic, value, _, _ in rows:
            if statistic == name and (site, head) in cells:
                by_hand[cells[site, head]] = value
        np.testing.assert_array_equal(column.value, by_hand)
    assert columns_of(table, {}, 0)["entropy"].value.size == 0
    assert columns_of(table.clear(), cells, 5) == {}


def test_rows_keep_the_order_in_which_they_were_added():
    table = TableBuilder()
    table.add("a", 0, "entropy", np.array([1.0, np.nan]), None, 3)
    table.add("no heads", 1, "entropy", np.zeros(0), None, 3)
    table.add("b", None, "entropy", 2.5, 0.5, 1)
    table.add("a", 0, "log_partition", np.array([3.0, 4.0]), np.array([0.1, np.nan]), np.array([1.0, 2.0]))
    assert table.frame().rows() == [
        ("a", 0, 0, "entropy", 1.0, None, 3),
        ("a", 0, 1, "entropy", None, None, 3),
        ("b", None, None, "entropy", 2.5, 0.5, 1),
        ("a", 0, 0, "log_partition", 3.0, 0.1, 1),
        ("a", 0, 1, "log_partition", 4.0, None, 2),
    ]
