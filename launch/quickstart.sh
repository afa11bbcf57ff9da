#!/usr/bin/env bash
# From nothing to a trained depth-recurrent model: needs only python3 (3.11-3.13) and PyPI, about ten minutes in all.
#   bash launch/quickstart.sh                        train on nested boolean expressions, show examples and figures
#   bash launch/quickstart.sh --training.steps 50    further words go to `dreamer train`
# Running it again is safe: what is installed or trained already is not done twice.
# PYTHON chooses the interpreter, DREAMER_VENV the folder of the virtual environment (default .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=${DREAMER_VENV:-.venv}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "quickstart.sh: needs Python 3.11 to 3.13, but $python is $("$python" --version 2>&1 || true); set PYTHON" >&2
    exit 2
fi
if ! "$venv/bin/dreamer" --version >/dev/null 2>&1; then
    echo "== installing into $venv (about 900 MB, a minute or two)"
    "$python" -m venv "$venv" || {
        echo "quickstart.sh: $python can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 2
    }
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -e .
fi

echo "== training (a few minutes on two cores)"
"$venv/bin/dreamer" train quickstart "$@"

cat <<NEXT

== what to try next
  source $venv/bin/activate
  dreamer config show quickstart                 every setting, and where it comes from
  dreamer train quickstart --run.dir runs/deep --model.depth 12
  dreamer train quickstart --run.dir runs/layers --model.variant LA --model.num_experts 16
  dreamer train quickstart --run.dir runs/graph --data.task reachability --recurrence.steps 0
  dreamer budget dr_da_16                        parameters, FLOPs and memory of a paper model
  dreamer config list                            the other configurations
  tensorboard --logdir runs                      curves (pip install tensorboard)
NEXT
