#!/usr/bin/env bash
# Prints the Python that runs fl_pallas, after making an environment if there is none.
#   usage: .ci/setup.sh EXTRAS          (messages go to stderr, the path to stdout)
# PYTHON       the Python to start from (python3). One that already imports torch and jax is used as it is.
# SKIP_SETUP   use PYTHON as it is, whatever it imports.
# VENV         where the environment is made (.venv).
# TORCH        what pip installs for PyTorch on a machine without an NVIDIA GPU (torch==2.13.0).
# TRITON       likewise, what compiles the kernels there: their registers hang on its version (triton==3.6.0).
# TORCH_INDEX  where its CPU build is; empty for pip's own settings, as on a machine with wheels of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
python=${PYTHON:-python3}
venv=${VENV:-.venv}
torch=${TORCH:-torch==2.13.0}
triton=${TRITON:-triton==3.6.0}

usable() { "$1" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "jax"))))'; }

if [[ -n ${SKIP_SETUP:-} ]] || { [[ ! -e $venv ]] && usable "$python"; }; then
    echo "using $(command -v "$python") as it is" >&2
    command -v "$python"
    exit
fi

# The environment is remade when what it was made from changes.
stamp="$venv/made-from"
wanted="$extras $torch $triton $(cksum < pyproject.toml)"
if [[ ! -e $stamp || $(<"$stamp") != "$wanted" ]]; then
    [[ -e $venv/bin/python ]] || "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip install --quiet)
    if nvidia-smi -L > /dev/null 2>&1; then
        "${pip[@]}" --editable ".[$extras,cuda13]" >&2
    else
        if [[ -z ${TORCH_INDEX+set} && -z ${PIP_FIND_LINKS:-} && $(uname) == Linux ]]; then
            TORCH_INDEX=https://download.pytorch.org/whl/cpu
        fi
        "${pip[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" "$triton" >&2
        "${pip[@]}" --editable ".[$extras]" >&2
    fi
    echo "$wanted" > "$stamp"
fi
echo "$PWD/$venv/bin/python"
