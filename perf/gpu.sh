#!/usr/bin/env bash
# All GPU tests and benches of this checkout, on a machine with an NVIDIA GPU, nvcc, and a Python that has torch,
# transformers, onnx and cuda-bindings. Nothing is installed: what that Python lacks (msgspec, gguf, ...) is taken
# from wheels in build/wheels (`make gpu-wheels` fetches them for Python 3.12).
#
#   perf/gpu.sh COMMAND…        run a command with castiron importable, for example
#   perf/gpu.sh tests [ARGS]    pytest -m gpu
#   perf/gpu.sh bench ENGINE…   bench-engine offline on each engine
#   perf/gpu.sh sanitize [ARGS] compute-sanitizer over the kernels' small tests (perf/sanitize.py)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
work=${TMPDIR:-/tmp}/castiron-gpu-$(id -u)
mkdir -p "$work/site/castiron" "$work/run"
ln -sfn "$root/castiron/__init__.py" "$root/castiron/py.typed" "$work/site/castiron/"
for folder in builder configs models perf plugins_cpu plugins_cuda runtime server; do
    ln -sfn "$root/$folder" "$work/site/castiron/$folder"
done
[ -n "$(compgen -G "$root/build/wheels/*.whl")" ] || {
    echo "gpu.sh: no wheels in build/wheels: run make gpu-wheels where there is a package registry" >&2
    exit 2
}
for wheel in "$root"/build/wheels/*.whl; do
    stamp=$work/$(basename "$wheel").done
    [ -e "$stamp" ] || { "$python" -m zipfile -e "$wheel" "$work/site" && touch "$stamp"; }
done
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
caller=$PWD
export CASTIRON_CACHE_DIR=${CASTIRON_CACHE_DIR:-$work/cache}
cd "$work/run" # not the checkout, whose folder castiron/ holds no more than __init__.py
case ${1:-tests} in
tests)
    shift || true
    exec "$python" -m pytest --rootdir "$root" -c "$root/pyproject.toml" -p no:cacheprovider -m gpu "${@:-$root/tests}"
    ;;
bench)
    shift
    [ $# -gt 0 ] || { echo "gpu.sh: bench wants one engine or several" >&2; exit 2; }
    for engine in "$@"; do
        engine=$(cd "$caller" && realpath -- "$engine")
        "$python" -m castiron.perf.cli offline "$engine" --batch 1,8,32,64 --prompt-len 128 --output-len 128
    done
    ;;
sanitize)
    shift
    exec "$python" -m castiron.perf.sanitize "$@"
    ;;
*) exec "$@" ;;
esac
