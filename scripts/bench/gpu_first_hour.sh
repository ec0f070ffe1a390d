#!/bin/sh
# Run the most important GPU checks first, on a machine with 1, 2 or 8 GPUs. Each row has a deadline, and the others run if one fails.
#   scripts/bench/gpu_first_hour.sh            writes docs/gpu-results.md, after each row
#   OUT=/tmp/results.md scripts/bench/gpu_first_hour.sh
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-docs/gpu-results.md}
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || gpus=
count=$(printf '%s' "$gpus" | grep -c .)
: >"$work/rows"
: >"$work/outputs"

write() {
    {
        printf '# What ran on GPUs\n\nRead this page to see which checks have run on a GPU, and what they measured. `scripts/bench/gpu_first_hour.sh` wrote it at commit\n%s, on %s, on ' "$(git rev-parse --short HEAD)" "$(date -u +%Y-%m-%d)"
        if [ "$count" -gt 0 ]; then printf '%s × %s (driver %s).\n' "$count" "$(printf '%s\n' "$gpus" | head -n 1)" "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
        else printf 'a machine without a GPU.\n'; fi
        printf '\n| Check | Expected | Result | Seconds |\n|---|---|---|---|\n'
        cat "$work/rows" "$work/outputs"
    } >"$work/page" && cp "$work/page" "$out"
}

row() { # row NAME GPUS SECONDS GOAL MODULE [ARGUMENT…]: add a line to the table, and the benchmark's output below it
    name=$1 needed=$2 limit=$3 goal=$4
    shift 4
    began=$(date +%s)
    if [ "$count" -eq 0 ]; then result='no GPU'
    elif [ "$count" -lt "$needed" ]; then result="needs $needed GPUs"
    else
        timeout -k 30 "$limit" "$python" -m "$@" >"$work/output" 2>&1
        case $? in
            0) result=$(grep . "$work/output" | tail -n 1) ;;
            124 | 137) result="not done after $limit s" ;;
            *) result="failed: $(grep . "$work/output" | tail -n 1)" ;;
        esac
        { printf '\n## %s\n\n`python -m %s`\n\n```\n' "$name" "$*"; tail -n 60 "$work/output"; printf '```\n'; } >>"$work/outputs"
    fi
    printf '| %s | %s | %s | %s |\n' "$name" "$goal" "$(printf '%s' "$result" | tr '|' '/')" "$(($(date +%s) - began))" >>"$work/rows"
    printf '%s: %s\n' "$name" "$result"
    write
}

bench=scripts.bench
check=$bench._gpu_checks
row 'the pipeline, with the tiny models' 1 600 'ends well' scripts.demo --folder "$work/demo" --images 400
row 'encode, 256 px' 1 300 'A10G 102 img/s' $bench.gpu_encode --sides 256 --seconds 3 --batches 32,64,128
row 'U-Net, 256 px, by strategy and compile' 1 900 'MFU 42 %' $bench.gpu_train --resolutions 256 --steps 20
row 'U-Net, 512 px' 1 400 'MFU 42 %' $bench.gpu_train --resolutions 512 --strategies fsdp --compile on --steps 20
row 'collocated on the second GPU' 2 300 'latents as on the CPU' $check latents --images "$work/demo/images"
row 'checkpoint' 2 300 'one process on each GPU' $check checkpoint --latents "$work/demo/latents" --work "$work/run"
row 'online, offline, collocated' 2 600 'online as fast as offline' $bench.tables --tiny --workers 1 --images "$work/demo/images" --latents "$work/demo/latents"
row 'exporter' 1 60 'memory as nvidia-smi has it' $check exporter
echo "see $out"
