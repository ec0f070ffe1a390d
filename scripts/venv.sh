#!/bin/sh
# Makes .venv out of requirements.lock if it is missing, half made, moved or out of date; else does nothing, at once.
#
# .venv/made-from is written last: without it .venv is half made and is made anew. It is removed before .venv
# is changed, so an interrupted change leaves a .venv that the next call makes anew, too.
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
is_whole_and_here() { # made to its end, and in this folder: scripts in .venv/bin name their folder
    [ -x .venv/bin/python ] && [ -f $made_from ] && [ "$(cut -d ' ' -f 2- $made_from)" = "$PWD" ]
}
is_supported() { # also asked of pythons too old to read anything but this
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}
find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    have=$("${PYTHON:-python3}" --version 2>&1) || have="none that runs"
    echo "make venv: sdp needs Python 3.11, 3.12 or 3.13, and ${PYTHON:-python3} is $have: install one, or name it" \
        "(make venv PYTHON=/path/to/python3.12)" >&2
    return 2
}

is_current && exit

PYTHON=$(find_python)
export PYTHON
mkdir -p .tools

# One at a time. The lock belongs to the open file (and so to uv too, should this shell be killed under it),
# not to the short-lived Python that takes it.
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
            sys.exit("make venv: another make has held .tools/venv.lock for %s s: end it, then try again" % sys.argv[1])
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
say_progress() { # where no terminal shows uv's own
    before=
    while sleep "${SDP_VENV_EVERY_S:-10}" 2>/dev/null && kill -0 $$ 2>/dev/null; do
        now=$(installed)
        what="installing"
        [ "$now" != "$before" ] || [ "$now" -lt 2 ] || what="compiling"
        echo "  $what: $now of at most $packages packages, $(du -sh .venv | cut -f 1)" >&2
        before=$now
    done
}
if is_whole_and_here; then
    echo "bringing .venv in line with requirements.lock" >&2
    rm $made_from
else
    echo "making .venv with $("$PYTHON" --version) out of requirements.lock: $packages packages, 6.7 GB; they are" \
        "downloaded where uv's cache lacks them, then installed and compiled" >&2
    rm -rf .venv
    "$uv" venv --quiet --no-python-downloads --python "$PYTHON" .venv
fi
quiet=
if [ ! -t 2 ]; then
    quiet=--quiet
    say_progress 9>&- >/dev/null &
    trap 'kill $! 2>/dev/null || true' EXIT # of what was started last: the line above
fi
# shellcheck disable=SC2086  # no word at all on a terminal
"$uv" pip sync $quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock
# What builds sdp is in the lock and installed by now: nothing more is downloaded.
"$uv" pip install --quiet --python .venv/bin/python --offline --no-deps --no-build-isolation --editable .
echo "$wanted" >$made_from.new
mv $made_from.new $made_from
