#!/bin/sh
# Print the path of the uv to use: a working one on PATH, or else (or with --pinned) the version in scripts/uv.lock,
# which pip installs into .tools/uv and checks by its hashes.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
lock=scripts/uv.lock
home=$PWD/.tools/uv

if [ "${1:-}" != --pinned ] && uv --version >/dev/null 2>&1; then
    command -v uv
    exit
fi
if cmp -s "$lock" "$home/made-from" && "$home/bin/uv" --version >/dev/null 2>&1; then
    echo "$home/bin/uv"
    exit
fi

rm -rf "$home"
mkdir -p "$home"
echo "installing uv into .tools/uv" >&2
install="install --quiet --disable-pip-version-check --no-input --require-hashes --only-binary :all: -r $lock"
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$home" >&2
    # shellcheck disable=SC2086  # splitting is intended
    "$home/bin/python" -m pip $install >&2
elif "$python" -m pip --version >/dev/null 2>&1; then
    # shellcheck disable=SC2086
    "$python" -m pip $install --target "$home" >&2
else
    echo "make venv: $python has neither ensurepip nor pip: install them (Debian, Ubuntu: apt-get install" \
        "python3-venv) or put uv on PATH" >&2
    exit 2
fi
cp "$lock" "$home/made-from"
echo "$home/bin/uv"
