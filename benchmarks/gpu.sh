#!/usr/bin/env bash
# Tries the kernel on the GPU of this machine and measures it, in one command, from any folder:
#
#     benchmarks/gpu.sh             everything
#     benchmarks/gpu.sh --quick     small sizes; no file of the checkout is changed
#
# Needs Linux with an NVIDIA GPU and its driver for CUDA 12 or newer, or a Mac with Apple silicon; and Python 3.11 or newer.
#
#     PYTHON      the Python that makes the virtual environment (default: the newest one in PATH)
#     VENV        where that is, or one that is to be used again (default: .venv-gpu in the checkout)
#     INSTALL=no  install nothing: VENV has the project and the extra `test` already
#
# Exit status: 0 if all steps ended well and the kernel is as fast as it has to be, 1 if not, 2 if this machine lacks something.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=()
case "${1-}" in
    "") ;;
    --quick) quick=(--quick) ;;
    *) echo "Usage: benchmarks/gpu.sh [--quick]" >&2; exit 2 ;;
esac

stop() {
    echo "gpu.sh: $*" >&2
    exit 2
}

# What pip installs on this machine.
requirements() {
    case "$(uname -s) $(uname -m)" in
        "Darwin arm64") echo ".[test]" ;;
        Darwin*) stop "This Mac has no Apple silicon, which mlx needs for its GPU." ;;
        Linux*)
            command -v nvidia-smi >/dev/null || stop "No nvidia-smi: this needs an NVIDIA GPU and its driver, or a Mac with Apple silicon."
            nvidia-smi -L 2>/dev/null | grep GPU >/dev/null || stop "nvidia-smi lists no GPU: $(nvidia-smi -L 2>&1 || true)"
            local cuda
            cuda=$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
            if [ "${cuda:-0}" -ge 13 ]; then
                echo ".[cuda,test]"
            elif [ "${cuda:-0}" -eq 12 ]; then
                echo ".[test] mlx[cuda12]"
            else
                stop "The driver has CUDA ${cuda:-of an unknown version}. mlx needs a driver for CUDA 12 or 13."
            fi
            ;;
        *) stop "mlx runs on Linux and macOS, not on $(uname -s)." ;;
    esac
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

newest_python() {
    local name
    for name in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3}; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    stop "No Python 3.11 or newer${PYTHON:+: $PYTHON is none}. Name one with PYTHON=..."
}

wanted=$(requirements)
venv=${VENV:-.venv-gpu}
if [ "${INSTALL-}" != no ]; then
    python=$(newest_python)
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || stop "$python makes no virtual environment in $venv."
    # Several words where there are several requirements.
    # shellcheck disable=SC2086
    (set -f; "$venv/bin/python" -m pip install --quiet --editable $wanted) || stop "pip cannot install $wanted in $venv."
fi
[ -x "$venv/bin/python" ] || stop "There is no Python in $venv. Leave INSTALL=no out, or name another VENV."
case "$venv" in /*) ;; *) venv=$PWD/$venv ;; esac
python=$venv/bin/python
"$python" -c 'import sys, mlx.core as mx; sys.exit(mx.default_device() != mx.gpu)' ||
    stop "mlx computes on a CPU in $venv. Remove that folder to install the mlx for this GPU."

folder=$(mktemp -d)
lines=$folder/lines.jsonl
touch "$lines"

# A step and its command; what it prints is shown and kept. The others run if it fails.
step() {
    local name=$1 status=0 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" 2>&1 | tee "$folder/$name.txt" || status=$?
    printf '{"bench": "gpu", "case": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - start)) >>"$lines"
}

step doctor "$python" -m mlx_blockpool.cli doctor --model demo --port $((20000 + RANDOM % 20000)) --store-dir "$folder"
step tests "$python" -m pytest -n 0 tests/kernel/test_on_device.py
step kernel "$python" benchmarks/bench_kernel.py --out "$lines" ${quick[@]+"${quick[@]}"}
step paths "$python" benchmarks/bench_paths.py --out "$lines" ${quick[@]+"${quick[@]}"}
step drafts "$python" benchmarks/bench_drafts.py --out "$lines" --quick

printf '\n== summary\n'
status=0
"$python" -m benchmarks.gpu "$lines" ${quick[@]+"${quick[@]}"} || status=1
echo "What was printed is in $folder."
exit "$status"
