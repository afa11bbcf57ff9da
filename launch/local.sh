#!/usr/bin/env bash
# Several processes on this machine as a pod would run them, one for each "host", with CPU devices.
#   bash launch/local.sh -n 4 -- train quickstart --mesh.data 4
#   bash launch/local.sh -n 4 -d 2 -- train CONFIG --mesh.data 8       two devices for each process
# When a process dies or asks for it (exit code 75), all of them end and are started again; the run goes on from its
# newest checkpoint. A mistake (2) or a defect (1) stops the job. The exit code is 0 when the run is complete.
#   -n N   processes (4)      -d N   devices of each (1)      -r N   restarts at most (20)
# PYTHON chooses the interpreter, DREAMER_VENV the folder of the virtual environment (default .venv).
set -euo pipefail

processes=4 devices=1 restarts=20 patience=30
usage() {
    echo "local.sh: $1; usage: bash launch/local.sh [-n PROCESSES] [-d DEVICES] [-r RESTARTS] -- train CONFIG [...]" >&2
    exit 2
}
while getopts ":n:d:r:" option; do
    case $option in
        n) processes=$OPTARG ;;
        d) devices=$OPTARG ;;
        r) restarts=$OPTARG ;;
        :) usage "-$OPTARG needs a number" ;;
        *) usage "unknown option -$OPTARG" ;;
    esac
done
[[ "$processes" =~ ^[1-9][0-9]*$ && "$devices" =~ ^[1-9][0-9]*$ ]] || usage "-n and -d need a number, at least 1"
[[ "$restarts" =~ ^(0|[1-9][0-9]*)$ ]] || usage "-r needs a number"
shift $((OPTIND - 1))
[[ "${1:-}" == train ]] || usage "what is started must be \`train\`"

venv=${DREAMER_VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}
python=${PYTHON:-$venv/bin/python}
[[ -n "${PYTHON:-}" || -x "$python" ]] || python=$(command -v python3)
command -v "$python" >/dev/null || usage "there is no Python at '$python'; set PYTHON"

export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"

pids=()
stopping=""
pass_on() { # to the processes; whoever sends it to us wants the run to stop, not to be restarted
    local sent=TERM # also for Ctrl-C: bash has what it starts in the background ignore that
    [[ "$stopping" != INT || "$1" != INT ]] || sent=KILL
    stopping=$1
    ((${#pids[@]} == 0)) || kill -s "$sent" "${pids[@]}" 2>/dev/null || true
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

# Runs the job once. Sets `worst` to what its processes ended with: 0, 1, 2, or 75 for everything a restart may mend.
run_once() {
    local port=$((20000 + RANDOM % 20000)) i code first_end="" killed running
    pids=()
    for ((i = 0; i < processes; i++)); do
        "$python" -m dreamer_jax "$@" \
            --coordinator "127.0.0.1:$port" --processes "$processes" --process "$i" &
        pids+=($!)
    done
    echo "local.sh: processes ${pids[*]}" >&2
    local alive=("${pids[@]}")
    worst=0 killed=""
    while ((${#alive[@]})); do
        running=()
        for i in "${alive[@]}"; do
            if kill -0 "$i" 2>/dev/null; then
                running+=("$i")
                continue
            fi
            code=0
            wait "$i" || code=$?
            case $code in
                0) ;;
                1 | 2) ((worst == 1 || worst == 2)) || worst=$code ;;
                *)
                    ((worst)) || worst=75
                    ((code < 128 || code == 134)) || killed=$i # 134: jax's own end when another one is gone
                    ;;
            esac
            ((code == 0)) || first_end=${first_end:-$SECONDS}
            ((code == 0)) || echo "local.sh: process $i ended with $code" >&2
        done
        alive=(${running[@]+"${running[@]}"})
        if ((${#alive[@]})) && [[ -n "$first_end" ]] && ((SECONDS - first_end > patience)); then
            echo "local.sh: ${alive[*]} still run $patience s after another has ended; killed" >&2
            kill -KILL "${alive[@]}" 2>/dev/null || true
        fi
        ((${#alive[@]} == 0)) || sleep 0.3 || true
    done
    pids=()
    ((worst != 1)) || [[ -z "$killed" ]] || worst=75 # errors of the others follow from that
}

for ((attempt = 0; ; attempt++)); do
    run_once "$@"
    [[ "$stopping" != INT ]] || exit 130
    ((worst == 75)) && [[ -z "$stopping" ]] || exit "$worst"
    if ((attempt == restarts)); then
        echo "local.sh: given up after $restarts restarts" >&2
        exit 75
    fi
    echo "local.sh: starting again" >&2
done
