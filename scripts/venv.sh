#!/bin/sh
# Create .venv from requirements.lock if it is missing, incomplete, moved or out of date; otherwise do nothing.
#
# .venv/made-from is written last, so a .venv without it is incomplete and is created anew. It is removed before .venv
# is changed, so that an interrupted change also leads to a new .venv.
set -eu
cd "$(dirname "$0")/.."
made_from=.venv/made-from
wait_s=1800

fingerprint() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}
wanted="$(cat requirements.lock pyproject.toml | fingerprint | cut -d ' ' -f 1) $PWD"

is_current() {
    [ -x .venv/bin/python ] && [ -f $made_from ] && [ "$(cat $made_from)" = "$wanted" ]
}
is_complete_and_unmoved() { # complete, and made in this folder, which the scripts in .venv/bin name
    [ -x .venv/bin/python ] && [ -f $made_from ] && [ "$(cut -d ' ' -f 2- $made_from)" = "$PWD" ]
}
is_supported() { # must parse in very old Pythons too
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    have=$("${PYTHON:-python3}" --version 2>&1) || have="missing"
    if [ -z "${PYTHON:-}" ] && uv=$(sh scripts/uv.sh); then
        echo "sdp needs Python 3.11 to 3.14, and python3 is $have: uv downloads 3.13" >&2
        "$uv" python install --quiet 3.13 && "$uv" python find 3.13 && return
    fi
    echo "make venv: sdp needs Python 3.11 to 3.14, and ${PYTHON:-python3} is $have: install one, or name it" \
        "(make venv PYTHON=/path/to/python3.12)" >&2
    return 2
}

is_current && exit

PYTHON=$(find_python)
export PYTHON
mkdir -p .tools

# One process at a time. The lock belongs to the open file, not to the short-lived Python that takes it, so uv holds it
# even if this shell is killed.
exec 9>.tools/venv.lock
"$PYTHON" - $wait_s <<'PY'
import fcntl, sys, time

deadline = time.monotonic() + float(sys.argv[1])
waiting = False
while True:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        if time.monotonic() > deadline:
            sys.exit("make venv: another make has held .tools/venv.lock for %s s: stop it, then try again" % sys.argv[1])
        if not waiting:
            waiting = True
            print("another make is preparing .venv: waiting for it", file=sys.stderr)
        time.sleep(0.2)
PY
is_current && exit

: "${UV_HTTP_TIMEOUT:=180}" # torch comes with gigabytes of libraries
export UV_HTTP_TIMEOUT
uv=$(sh scripts/uv.sh)
packages=$(grep -c '^[a-z0-9].*==' requirements.lock)
installed() {
    set -- .venv/lib/python3*/site-packages/*.dist-info
    echo $#
}
say_progress() { # without a terminal uv shows none
    before=
    while sleep "${SDP_VENV_EVERY_S:-10}" 2>/dev/null && kill -0 $$ 2>/dev/null; do
        now=$(installed)
        what="installing: $now of at most $packages packages"
        [ "$now" != "$before" ] || [ "$now" -lt 2 ] || what="installed, and compiled in a few minutes more"
        echo "  $what, $(du -sh .venv | cut -f 1)" >&2
        before=$now
    done
}
if is_complete_and_unmoved; then
    echo "updating .venv to requirements.lock" >&2
    rm $made_from
else
    echo "creating .venv with $("$PYTHON" --version) from requirements.lock: $packages packages, 6.7 GB; those" \
        "missing in uv's cache are downloaded, then all are installed and compiled" >&2
    rm -rf .venv
    "$uv" venv --quiet --no-python-downloads --python "$PYTHON" .venv
fi
quiet=
if [ ! -t 2 ]; then
    quiet=--quiet
    say_progress 9>&- >/dev/null &
    trap 'kill $! 2>/dev/null || true' EXIT
fi
# shellcheck disable=SC2086  # empty on a terminal
"$uv" pip sync $quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock
# The build requirements of sdp are in the lock and installed by now, so nothing more is downloaded.
"$uv" pip install --quiet --python .venv/bin/python --offline --no-deps --no-build-isolation --editable .
echo "$wanted" >$made_from.new
mv $made_from.new $made_from
