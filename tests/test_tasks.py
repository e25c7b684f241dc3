"""The six tasks: each a block of at most ten lines, to which the README leads by a link. tests/test_examples.py runs them."""

import re
from pathlib import Path

from scripts.gallery import slug
from tests.support.site_search import SITUATIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "start" / "tasks.md"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.+?)```", re.DOTALL)

SECTIONS = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))


def test_each_task_is_one_block_of_at_most_ten_lines_with_its_output():
    assert len(SECTIONS) == 6
    for title, text in SECTIONS.items():
        ((source, _),) = BLOCK.findall(text)
        lines = [line for line in source.split("\n") if line.strip()]
        assert len(lines) <= 10, title
        assert "](../" in text, f"{title} leads on to no page"


def test_the_readme_leads_to_each_task_in_the_words_of_the_task():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for title in SECTIONS:
        words = title[0].lower() + title[1:]
        assert f"[{words}](docs/start/tasks.md#{slug(title)})" in readme
        assert SITUATIONS[words.rstrip("?")] == "start/tasks"  # the search finds them too


def test_clouds_of_another_size_give_what_the_page_says(capsys):
    """The page shows the output of its block, and says what the same block gives with fewer tokens."""
    text = SECTIONS["Is Theorem 1's rate right for my map?"]
    ((source, _),) = BLOCK.findall(text)
    ((size, result),) = re.findall(r"clouds of (\d+) give (\S+ ± [\d.]*\d)", text)
    assert source.count("4000") == 1
    exec(source.replace("4000", size), {})
    assert capsys.readouterr().out.startswith(f"measured {result} nats")
