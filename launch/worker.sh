#!/usr/bin/env bash
# What launch/tpu runs on every machine of a TPU. Everything is safe to repeat: connections drop.
#   worker.sh install STAMP PREPARE    unpack ~/dreamer.tar.gz, install it, run the shell command PREPARE in the checkout
#   worker.sh start ATTEMPT WORDS...   start `dreamer WORDS`; nothing if this attempt was started already
#   worker.sh status                   one line: attempt, running | exited | lost, exit code, lines of the log
#   worker.sh log FIRST                lines of the log from this number on
#   worker.sh stop                     end the training as a preemption would: it saves; killed after two minutes
set -euo pipefail
home=$HOME/dreamer
mkdir -p "$home"
cd "$home"

read_file() { cat "$1" 2>/dev/null || true; }

alive() { # the process of the last attempt, since this machine was started
    local pid
    pid=$(read_file pid)
    [[ -n "$pid" && "$(read_file boot)" == "$(boot_id)" ]] && kill -0 "$pid" 2>/dev/null
}

boot_id() { read_file /proc/sys/kernel/random/boot_id; }

find_python() {
    local name
    for name in python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    # The machine's own Python is too old, or has no venv: uv brings one.
    python3 -m pip install --quiet --user uv >&2 ||
        python3 -m pip install --quiet --user --break-system-packages uv >&2
    python3 -m uv python install --quiet 3.12 >&2
    python3 -m uv python find 3.12
}

install() {
    local stamp=$1 prepare=$2 python
    # Both through $(...), which leaves out line breaks at the end.
    [[ "$(read_file installed)" == "$(printf %s "$stamp $prepare")" ]] && return
    stop # the program is about to be replaced
    rm -rf installed source venv
    mkdir source
    tar -xzf "$HOME/dreamer.tar.gz" -C source
    python=$(find_python)
    "$python" -m venv venv
    venv/bin/python -m pip install --quiet --disable-pip-version-check -c source/requirements/test.lock -e 'source[tpu,gcs]'
    venv/bin/dreamer --version
    if [[ -n "$prepare" ]]; then
        (cd source && PATH="$home/venv/bin:$PATH" bash -euo pipefail -c "$prepare" 9>&-)
    fi
    echo "$stamp $prepare" >installed
}

start() {
    local attempt=$1
    shift
    [[ "$(read_file attempt)" == "$attempt" ]] && return
    stop
    rm -f code pid
    boot_id >boot
    echo "$attempt" >attempt
    echo "== attempt $attempt: dreamer $*" >>log
    # It must outlive this connection, and hold neither its lock nor its output.
    setsid nohup bash "$self" watch "$@" </dev/null >>log 2>&1 9>&- &
    for _ in $(seq 100); do
        [[ -s pid ]] && return
        sleep 0.1
    done
    echo "the training process did not start" >&2
    return 1
}

watch() { # the parent of `dreamer`, which keeps its exit code
    local code=0
    cd source
    ../venv/bin/dreamer "$@" &
    echo $! >../pid.half && mv ../pid.half ../pid
    wait $! || code=$?
    echo "$code" >../code.half && mv ../code.half ../code
}

status() {
    local state=idle code
    code=$(read_file code)
    if [[ -n "$code" ]]; then
        state=exited
    elif alive; then
        state=running
    elif [[ -e attempt ]]; then
        state=lost
    fi
    printf 'dreamer-worker %s attempt=%s state=%s code=%s lines=%s\n' \
        "$(hostname)" "$(cat attempt 2>/dev/null || echo 0)" "$state" "$code" "$(wc -l 2>/dev/null <log || echo 0)"
}

stop() {
    local pid
    alive || return 0
    pid=$(read_file pid)
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 240); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    if kill -KILL "$pid" 2>/dev/null; then
        echo "the training did not end in two minutes; killing it" >&2
    fi
    for _ in $(seq 300); do # until its exit code is kept, or it would be taken for the next attempt's
        [[ -s code ]] && return 0
        sleep 0.1
    done
}

self=$HOME/worker.sh
verb=$1
shift
case $verb in
install | start | stop)
    exec 9>lock
    flock 9 # a dropped connection may have left the same command running
    "$verb" "$@"
    ;;
watch | status) "$verb" "$@" ;;
log) tail -n "+$1" log 2>/dev/null | head -n 2000 || true ;;
*)
    echo "worker.sh: unknown command $verb" >&2
    exit 2
    ;;
esac
