#!/bin/sh
# Resolve the ranges of pyproject.toml into requirements.lock: one lock for Python 3.11 to 3.14 on Linux and macOS, with
# every version pinned, every file hashed and no registry's address. Pins that still fit are kept. The images' locks are
# subsets of it, so that images install nothing without a hash. The site's tools have a lock of their own, scripts/site.lock.
set -eu
cd "$(dirname "$0")/.."
uv=$(sh scripts/uv.sh --pinned) # other versions of uv may write the same lock differently

resolve() { # file requirements-and-options...
    out=$1
    shift
    "$uv" pip compile "$@" --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --quiet -o "$out"
}

resolve requirements.lock pyproject.toml --extra worker --extra exporter --group dev "$@"
resolve images/ray/requirements.lock pyproject.toml --extra worker --constraint requirements.lock --upgrade
resolve scripts/site.lock --group docs "$@"
# Only the packages that sdp.exporter imports: 12 MB instead of 400.
printf 'nvidia-ml-py\nprometheus-client\n' |
    resolve images/exporter/requirements.lock - --constraint requirements.lock --upgrade
