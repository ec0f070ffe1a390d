#!/bin/sh
# Run every check, even after one has failed, and list the failed ones at the end.
set -u
cd "$(dirname "$0")/.." || exit
python=.venv/bin/python
failed=""

check() { # name command...
    name=$1
    shift
    echo "== $name"
    "$@" || failed="$failed, $name"
}

check "ruff check" $python -m ruff check .
check "ruff format" $python -m ruff format --check .
check "mypy" $python -m mypy
check "import rules" $python -m scripts.import_rules
check "prose rules" $python -m scripts.prose_rules
if command -v shellcheck >/dev/null; then
    check "shellcheck" shellcheck scripts/*.sh scripts/bench/*.sh .ci/run
else
    echo "== shellcheck: not run, since it is not installed"
fi

if [ -n "$failed" ]; then
    echo "make check: failed: ${failed#, }" >&2
    exit 1
fi
