#!/usr/bin/env bash
# Checks everything: formatting, lint, scripts, types, import direction, tests. Needs only python3 (3.11-3.13) and PyPI.
#   bash launch/test.sh                     everything that runs on a CPU in minutes
#   bash launch/test.sh tests/config -x     further words go to pytest
#   bash launch/test.sh -m slow             the tests of another marker (slow, aot, gpu, llama3; see setup.cfg)
#   bash launch/test.sh --newest            with the newest packages that there are in place of the locked ones
# PYTHON chooses the interpreter, DREAMER_VENV the folder of the virtual environment (default .venv-test, or .venv-newest).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

newest=
if [[ "${1:-}" == --newest ]]; then
    newest=newest
    shift
fi
python=${PYTHON:-python3}
venv=${DREAMER_VENV:-.venv-${newest:-test}}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "test.sh: needs Python 3.11 to 3.13, but $python is $("$python" --version 2>&1 || true); set PYTHON" >&2
    exit 2
fi

# What an extra needs: the locked versions, or the newest ones that go together. Most of their modules are never imported
# here, and compiling them all took half of the time.
install() {
    local what=(-r "requirements/$1.lock")
    [[ -z "$newest" ]] || what=(--upgrade --upgrade-strategy eager -e ".[$1]")
    "$venv/bin/python" -m pip install -qq --no-compile --disable-pip-version-check "${what[@]}"
}
export -f install
export newest venv

# The environment is laid again only when what it is made of has changed; the newest of a day are those of its first run.
stamp=$("$python" - "${newest:+$(date -I)}" <<'PYTHON'
import hashlib, os, pathlib, sys
files = (*(f"requirements/{name}.lock" for name in ("test", "export", "eval")), "setup.cfg", "pyproject.toml")
parts = [sys.version, os.getcwd(), *sys.argv[1:], *(pathlib.Path(p).read_text() for p in files)]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
)
if [[ "$(cat "$venv/installed" 2>/dev/null || true)" != "$stamp" ]]; then
    echo "== install into $venv"
    start=$SECONDS
    if [[ -e "$venv" && ! -e "$venv/pyvenv.cfg" ]]; then # it is emptied below
        echo "test.sh: $venv is not a virtual environment; name another folder in DREAMER_VENV" >&2
        exit 2
    fi
    "$python" -m venv --clear "$venv" || {
        echo "test.sh: $python can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 2
    }
    install test
    # torch is large and not everywhere: without it the tests of the export to PyTorch are skipped, and say so.
    timeout 300 bash -c "install export" ||
        echo "   the extra 'export' can't be installed here: tests that need torch will be skipped" >&2
    timeout 300 bash -c "install eval" ||
        echo "   the extra 'eval' can't be installed here: tests of lm-eval and math-verify will be skipped" >&2
    [[ -n "$newest" ]] || # then `install` has brought it already
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
    echo "$stamp" >"$venv/installed"
    echo "   $((SECONDS - start)) s"
fi

# Tests that compile for TPUs need the libtpu, and those on a GPU the plugin, that belong to the jax that is here.
platform=
[[ " $* " != *" -m aot "* ]] || platform=tpu
[[ "${DREAMER_TEST_PLATFORM:-cpu}" != cuda ]] || platform=cuda13
if [[ -n "$platform" ]]; then
    what=("jax[$platform]")
    [[ -n "$newest" ]] || what+=(-c requirements/test.lock)
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "${what[@]}"
fi

venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH"
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 # no look for a newer pyright

failed=()
stage() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    "$@" || failed+=("$name")
    echo "   $((SECONDS - start)) s"
}
stage "format" ruff format --check .
stage "lint" ruff check .
stage "scripts" shellcheck launch/*.sh launch/tpu launch/gke/jobset .ci/run
stage "types" pyright --pythonpath "$(command -v python)"
stage "import direction" lint-imports
# A file stays in one process, so that what its tests share is compiled once; tests/conftest.py gives the order.
stage "tests" python -m pytest -q --numprocesses=auto --dist=loadfile --no-loadscope-reorder --durations=10 "$@"

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo "all good in $SECONDS s"
