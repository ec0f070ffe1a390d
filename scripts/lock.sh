#!/bin/sh
# Resolves the ranges of pyproject.toml into requirements.lock: one lock for Python 3.11 to 3.13 on Linux and macOS,
# every version pinned, every file hashed, no address of a registry. Pins that still fit are kept.
set -eu
cd "$(dirname "$0")/.."
uv=$(sh scripts/uv.sh --pinned) # another uv may write the same lock differently
"$uv" pip compile pyproject.toml --extra worker --extra fp8 --extra exporter --group dev \
    --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --quiet -o requirements.lock "$@"
