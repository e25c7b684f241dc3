"""The page on machines says how near imputers come: the numbers of the quickest are computed again."""

from pathlib import Path

from scripts.imputers import DRAWS, IMPUTERS, TABLES, error

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "machines.md"


def test_the_page_has_the_numbers_of_the_script():
    errors = {
        name: [f"{error(IMPUTERS['KNNImputer'], table, seed):.2f}"[1:] for seed in range(DRAWS)]
        for name, table in TABLES.items()
    }
    sentence = f"`KNNImputer` is {', '.join(errors['wines'])} and {', '.join(errors['irises'])} off."
    assert sentence in PAGE.read_text(encoding="utf-8")


def test_cells_that_are_filled_right_are_no_error():
    table = TABLES["irises"]
    assert error(lambda holes: table, table, 0) == 0
