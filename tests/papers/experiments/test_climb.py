"""The experiment climb: its registration, its numbers on made-up heads, and heads that climb or do not."""

import hashlib
import re
from pathlib import Path

from massieu.papers.experiments.study import find

ROOT = Path(__file__).parents[3]
REGISTRATION = re.compile(r"<!-- registration of climb -->\n(.*?)<!-- end of the registration -->", re.DOTALL)


def test_the_registration_is_the_one_that_results_name():
    page = (ROOT / "docs" / "theory" / "experiments.md").read_text(encoding="utf-8")
    (text,) = REGISTRATION.findall(page)
    assert hashlib.sha256(text.encode()).hexdigest() == find("climb").registration["registration"]
