"""Results and rendered pages, made once per test run."""

import pytest
import synthetic_results
from synthetic_results import Results

from massieu.report.page import render


@pytest.fixture(scope="session")
def results() -> dict[str, Results]:
    kinds = ("encoder", "large", "encoder_decoder", "bare", "hostile")
    return {kind: getattr(synthetic_results, kind)() for kind in kinds}


@pytest.fixture(scope="session")
def pages(results: dict[str, Results]) -> dict[str, str]:
    return {kind: render(*result) for kind, result in results.items()}
