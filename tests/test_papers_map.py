"""What the papers name and a user looks for: each row of the map has code that runs and prints what the page shows.

The rows are sections of docs/how-to/papers_questions.md. A row is its heading there; the last section alone may be sentences.
"""

import re
import runpy
from pathlib import Path

import pytest
import torch
from tests.support.printed import differing

from massieu import measures

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "papers_questions.md"
MAP = "## What the papers name, in a few lines\n"
SENTENCES = "In one sentence"
MOST_LINES = 10
"""Of a block, without imports and empty lines."""
ROWS = (
    "Is my model's representation the posterior?",
    "ViT as a function of a set",
    "A condition number pivotal to downstream tasks",
    "Deep equilibrium transformers, monotone operators",
    "Memory networks of several hops, cosine attention",
    "A distribution of queries into a distribution of keys",
    "The evidence lower bound",
    "Residual networks as discretised differential equations",
    "Storing patterns in discrete networks, classical and modern",
    "Renormalisation, flows and fixed points in the space of theories",
    "Layers stacked into a deep machine; mixtures of machines",
)
"""The headings of the rows that have code, in the order of the page."""
NAMED = (
    "boosting as an estimator",
    "wake–sleep",
    "multidimensional scaling",
    "triplet loss",
    "gated writes of neural Turing machines",
    "time warping by the LSTM's gates",
)
"""What the last section says in sentences alone."""
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.DOTALL)


def sections(page: str) -> dict[str, str]:
    """The sections of the map by their headings."""
    _, begin, text = page.partition(MAP)
    assert begin, f"{PAGE.name} must have the heading {MAP!r}"
    text = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    parts = re.split(r"^### (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def code_lines(block: str) -> list[str]:
    """The lines that a user types for the row itself."""
    return [line for line in block.splitlines() if line.strip() and not re.match(r"(import|from) ", line)]


def test_every_row_is_on_the_map_and_has_a_block_that_a_user_can_type():
    found = sections(PAGE.read_text(encoding="utf-8"))
    assert tuple(found) == (*ROWS, SENTENCES)
    without = [heading for heading in ROWS if not BLOCK.search(found[heading])]
    assert without == [], "these rows have no code"
    blocks = {heading: BLOCK.findall(found[heading]) for heading in ROWS}
    long = {heading for heading, each in blocks.items() for code, _ in each if len(code_lines(code)) > MOST_LINES}
    assert not long, f"these rows have blocks of more than {MOST_LINES} lines"
    silent = {heading for heading, each in blocks.items() if not any(shown for _, shown in each)}
    assert not silent, "these rows show nothing of what they print"


@pytest.mark.medium
@pytest.mark.parametrize("heading", ROWS)
def test_the_code_of_a_row_runs_by_itself(heading, tmp_path, monkeypatch, capsys):
    """The blocks of one row are one script; a block of text below a block of Python is what that block prints."""
    blocks = BLOCK.findall(sections(PAGE.read_text(encoding="utf-8"))[heading])
    script = tmp_path / "row.py"
    script.write_text("\nprint('END OF BLOCK')\n".join(code for code, _ in blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out.split("END OF BLOCK\n")
    assert len(printed) == len(blocks)
    for shown, (_, expected) in zip(printed, blocks, strict=True):
        assert not expected or differing(shown, expected) == []


def test_the_last_section_says_of_each_what_it_is_what_to_use_and_why_not_here():
    text = sections(PAGE.read_text(encoding="utf-8"))[SENTENCES]
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")][1:]
    assert tuple(row[0] for row in rows) == NAMED
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)


def test_a_row_without_code_is_noticed():
    assert sections(
        f"{MAP}\nWords.\n\n### One\n\nNo code.\n\n### Two\n\n```python\nx = 1\n```\n\n## Next\n\n### Three\n"
    ) == {
        "One": "\nNo code.\n\n",
        "Two": "\n```python\nx = 1\n```\n\n",
    }
    assert not BLOCK.search("\nNo code.\n\n")
    assert code_lines("import torch\nfrom massieu import ops\n\nx = 1\n\nprint(x)\n") == ["x = 1", "print(x)"]


def test_the_sentence_on_the_triplet_loss_is_true():
    """InfoNCE with one negative is log(1 + exp(β(s₋ − s₊))); with a margin, it tends to the hinge as β grows."""
    anchor, positive, negative = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    to_positive, to_negative = ((anchor - other).norm(dim=-1) for other in (positive, negative))
    hinge = torch.nn.functional.triplet_margin_loss(anchor, positive, negative, margin=0.5, eps=0.0, reduction="none")
    beta = 1e4
    scores = torch.stack([-to_positive - 0.5, -to_negative], -1)
    soft = torch.nn.functional.cross_entropy(beta * scores, torch.zeros(5, dtype=torch.long), reduction="none") / beta
    assert soft.numpy() == pytest.approx(hinge.numpy(), abs=1e-4)  # log(2)/β at most
    assert float((hinge > 0).double().mean()) > 0


def test_the_sentence_on_scaling_is_true():
    points = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centring = torch.eye(7, dtype=torch.float64) - 1 / 7
    gram = -0.5 * centring @ torch.cdist(points, points).square() @ centring
    centred = points - points.mean(0)
    assert gram.numpy() == pytest.approx((centred @ centred.mT).numpy(), abs=1e-12)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    principal = left * values
    assert (principal @ principal.mT).numpy() == pytest.approx(gram.numpy(), abs=1e-12)


def test_the_sentence_on_boosting_is_true():
    """AdaBoost's weights of the examples after a round: exp(−Σ y α g), up to their sum."""
    labels = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    learners = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    alpha = torch.tensor([0.4, 0.7], dtype=torch.float64)
    rounds = measures.boosting(labels, torch.zeros(3, dtype=torch.float64), learners).tilt(alpha)
    expected = torch.exp(-labels * (learners @ alpha))
    edge = -(expected / expected.sum() * labels) @ learners
    assert rounds.mean(torch.zeros(2, dtype=torch.float64)).numpy() == pytest.approx(edge.numpy(), abs=1e-12)
