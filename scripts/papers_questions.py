"""What the papers' questions are answered on a model, by two texts: the tables of docs/how-to/papers_questions.md.

`python scripts/papers_questions.py MODEL [--tokens N]`. The first text is the help that comes with Python, the second the
descriptions of data sets that come with scikit-learn.
"""

import argparse
import sys
from importlib.resources import files
from pydoc_data.topics import topics

import massieu
from massieu.foundation.numbers import number
from massieu.report.questions import QUESTIONS, Answer


def texts() -> dict[str, str]:
    """By name, two texts that share no author."""
    everything = files("sklearn.datasets.descr").iterdir()
    described = sorted((each for each in everything if each.name.endswith(".rst")), key=lambda each: each.name)
    return {
        "Python's help": "\n\n".join(topics.values()),
        "scikit-learn's data sets": "\n\n".join(each.read_text(encoding="utf-8") for each in described),
    }


def cell(answer: Answer) -> str:
    """Median and range, the control's median, and how many differ from it."""
    control = "–" if answer.control is None else number(answer.control)
    tested = f"{answer.named} of {answer.tested}" if answer.tested else "–"
    return f"{number(answer.middle)} ({number(answer.lowest)} to {number(answer.highest)}) | {control} | {tested}"


def table(results: dict[str, massieu.ProbeResult]) -> str:
    """A line for each statistic: both texts side by side."""
    first, *others = ({a.name: a for q in result.questions for a in q.answers} for result in results.values())
    lines = ["| group, statistic |" + " ".join(f" {name} | control | differ |" for name in results)]
    lines.append("|---|" + "---|---|---|" * len(results))
    for question in next(iter(results.values())).questions:
        for answer in question.answers:
            cells = [cell(known[answer.name]) if answer.name in known else "– | – | –" for known in (first, *others)]
            unit = f", {answer.unit}" if answer.unit else ""
            lines.append(f"| `{question.group}`: {answer.title.lower()}{unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Probe both texts and print the table, and what each group took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--statistics", default=",".join(QUESTIONS))
    given = parser.parse_args()
    results = {}
    for name, text in texts().items():
        results[name] = massieu.probe(
            given.model, massieu.Text(strings=[text], limit=given.tokens), statistics=given.statistics.split(",")
        )
        print(f"{name}: {dict(results[name].run.timing)}", file=sys.stderr)
    print(table(results))


if __name__ == "__main__":
    main()
