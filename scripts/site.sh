#!/bin/sh
# Build the pages of docs/ as a site into build/site, with mkdocs as scripts/site.lock pins it, in .tools/site.
set -eu
cd "$(dirname "$0")/.."
home=$PWD/.tools/site

if ! cmp -s scripts/site.lock "$home/made-from"; then
    rm -rf "$home"
    "${PYTHON:-python3}" -m venv "$home"
    "$home/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r scripts/site.lock
    cp scripts/site.lock "$home/made-from"
fi
NO_MKDOCS_2_WARNING=1 exec "$home/bin/mkdocs" build --strict "$@"
