#!/bin/sh
# What some tests need beside Python: a C++ compiler, and a browser with its driver. Installs what is missing where it
# may (Debian and its relatives, as root or with a sudo that asks nothing); elsewhere those tests are skipped, and the
# last lines of the test run say what to install.
set -eu
cd "$(dirname "$0")/.."
python=$1

packages=$("$python" - <<'PYTHON'
import sys
sys.path.insert(0, ".")
from tests.support import needs  # with pytest, which is installed by now
browser = needs.browser()
missing = [] if needs.compiler() else ["g++"]
if browser is None:
    missing += ["chromium", "chromium-driver"]
elif browser.driver is None and browser.kind == "chrome":
    missing += ["chromium-driver"]
print(*missing)
PYTHON
)
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "not found and not installed (no apt-get here): $packages; the tests that need them are skipped" >&2
  exit 0
elif [ "$(id -u)" = 0 ]; then
  as_root=""
elif sudo -n true 2>/dev/null; then
  as_root="sudo -n"
else
  echo "not found and not installed (needs root): $packages; the tests that need them are skipped" >&2
  exit 0
fi

echo "installing what some tests need: $packages" >&2
# shellcheck disable=SC2086
{
  $as_root apt-get update -qq || echo "apt-get update failed; trying with the lists that are here" >&2
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
} || echo "could not be installed: $packages; the tests that need them are skipped" >&2
