#!/usr/bin/env bash
# Builds the documentation as a site: build/site/index.html. Needs only python3 (3.11-3.13) and PyPI.
#   bash launch/docs.sh              a dead link, or a page that stands nowhere in the navigation, is an error
#   bash launch/docs.sh -E           further words go to sphinx-build; -E reads every page anew
# PYTHON chooses the interpreter, DREAMER_VENV the folder of the virtual environment (default .venv-docs).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=${DREAMER_VENV:-.venv-docs}
if ! "$venv/bin/sphinx-build" --version >/dev/null 2>&1; then
    echo "== installing into $venv"
    [[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv" || {
        echo "docs.sh: $python can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 2
    }
    # requirements/test.lock holds the versions of what the package itself needs.
    "$venv/bin/python" -m pip install -q --disable-pip-version-check \
        -c requirements/test.lock -r requirements/docs.lock -e .
fi
"$venv/bin/python" -m sphinx -b html -c docs/site -W --keep-going -q "$@" docs build/site
echo "done: build/site/index.html"
