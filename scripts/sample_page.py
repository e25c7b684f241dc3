"""The sample report, docs/samples/smollm2.html: a probe of SmolLM2-135M-Instruct on Python's reference.

`make sample` installs the package that ships the decoder and runs this. The page is that of `massieu probe`, with one of its
two example windows, so that it is small enough to be kept in the repository.

Run: python scripts/sample_page.py MODEL [--tokens N]
"""

import argparse
from pathlib import Path

import massieu
from massieu.report.page import render

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "samples" / "smollm2.html"
WINDOW = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or .gguf file of the model", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    arguments = parser.parse_args()
    result = massieu.probe(arguments.model, massieu.Text(window=WINDOW, limit=arguments.tokens))
    details = {**result.details, "examples": result.details["examples"][:1]}
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(render(result.run, details, result.heads, result.layers), encoding="utf-8")
    print(f"page: {arguments.page}, {arguments.page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
