#!/bin/sh
# Run the unit tests once with the lowest versions that pyproject.toml allows, in .tools/lowest. Only the base install is
# there: what needs a package of an extra is skipped (tests/base_install.py).
set -eu
cd "$(dirname "$0")/.."
uv=$(sh scripts/uv.sh)
python=.tools/lowest/bin/python
"$uv" venv --quiet --clear --no-python-downloads --python "${PYTHON:-python3}" .tools/lowest
"$uv" pip install --quiet --python "$python" --resolution lowest-direct -r pyproject.toml --group test
exec "$python" -m pytest -p tests.base_install -n "${WORKERS:-2}" -q tests/unit "$@"
