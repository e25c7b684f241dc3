"""mkdocs' own command, by which the site's tutorials run at sizes that take seconds: ``python -m tests.support.short_site``.

Every block is executed, and what it prints and draws is on the page; `make docs` runs them as they are printed. Pages are
run in forks of one process that has loaded what most of them load.
"""

import gc
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from tempfile import TemporaryDirectory

import scripts.tutorials
from mkdocs.__main__ import cli

SHORTER = {
    "limit=8192": "limit=512",
    "massieu.probe(data=text)": "massieu.probe(data=text, draws=2)",
    'massieu.Checkpoint(dtype="bfloat16"), text,': 'massieu.Checkpoint(dtype="bfloat16"), text, draws=2,',
    "--max-tokens 2048": "--max-tokens 256 --quick",
    "tokens = (512, 1024, 2048)": "tokens = (512,)",
    "for step in range(401):": "for step in range(21):",
    "if step in (40, 400):": "if step in (4, 20):",
    "if step == 40 else": "if step == 4 else",
    "counts, noise = [10, 30, 100, 300, 1000], [2.0, 4.0, 6.0]": "counts, noise = [10, 30], [2.0, 4.0, 6.0]",
    "trials=100": "trials=10",
    "steps=400": "steps=4",
    "train(model, task, drawn, steps=more, contexts=128": "train(model, task, drawn, steps=2, contexts=32",
    "n_iter=50": "n_iter=5",
    "n_iter=300": "n_iter=10",
    "n_iter=200": "n_iter=10",
    "n_iter=40": "n_iter=4",
    "ShuffleSplit(5,": "ShuffleSplit(2,",
    "steps=240": "steps=40",
}
"""What stands in the tutorials, and what is run in its place."""


def shorter(page: str) -> str:
    """A tutorial's Markdown with the smaller sizes."""
    for printed, run in SHORTER.items():
        page = page.replace(printed, run)
    return page


def executed(page: str) -> str:
    """As `scripts.tutorials.executed`, of the smaller sizes and in a fork of this process."""
    fork = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=fork) as process:
        return process.submit(_run_in, folder, shorter(page)).result()


def _run_in(folder: str, page: str) -> str:
    os.chdir(folder)
    return scripts.tutorials.run(page)


LOADED = (
    "matplotlib.pyplot", "sklearn.datasets", "sklearn.model_selection", "transformers", "massieu.energy", "massieu.nn",
    "massieu.papers.experiments.tasks", "massieu.probing.run", "massieu.report.page", "massieu.testing",
)  # fmt: skip
"""What the pages load, once for all."""


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    scripts.tutorials.executed = executed
    # What is loaded stays, and so does most of what a build makes: a quarter of its time went into looking for garbage.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    cli()
