#!/bin/sh
# Measure the most important figures of a machine with GPUs; scripts/bench/gpu_first_hour.py says how.
#   PYTHON=/usr/bin/python3 OUT=/tmp/results scripts/bench/gpu_first_hour.sh [check | ROW…]
set -u
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || {
    echo "gpu_first_hour: $python is missing or not 3.11 to 3.14; set PYTHON to one that has torch" >&2
    exit 2
}
exec "$python" -m scripts.bench.gpu_first_hour "$@"
