#!/usr/bin/env bash
# Lint, types and tests with one Python.    usage: .ci/check.sh PYTHON [pytest arguments]
# A tool that PYTHON lacks is skipped by name; without pytest the check fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
export PYTHONPATH=.

has() { "$python" -c "import $1" 2> /dev/null; }
run() { if has "$1"; then "$python" -m "$@"; else echo "SKIPPED: $1 is not installed for $python"; fi; }

run ruff check .
run ruff format --check .
run pyright --pythonpath "$python" fl_pallas
if [[ ${1:-} == -n ]]; then
    if has xdist; then
        set -- "$@" --dist worksteal # the slowest tests come last, and would keep one process alone
    else
        echo "pytest-xdist is not installed for $python: one process"
        shift 2
    fi
fi
"$python" -m pytest "$@"
