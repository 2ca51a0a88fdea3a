#!/bin/sh
# Every kernel under compute-sanitizer, on a GPU: reads and writes outside of tensors, and races with TOOL=racecheck.
#
#   evals/sanitize.sh [LOG]        PYTHON, TOOL, EVERY (1: all cases) and SECONDS_MOST from the environment
#
# The files of tests/kernels that are short run whole, of the others every EVERY-th case: each kernel runs, in few of its
# shapes. Tensors are allocated one by one, or the sanitizer would see one block of memory; graphs cannot be captured so.
# The log's last lines are the tests' and the sanitizer's counts.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} tool=${TOOL:-memcheck} every=${EVERY:-8} log=${1:-/dev/null}
cases=$(mktemp) && trap 'rm -f "$cases" "$cases.log"' EXIT
export PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1

collect() { "$python" -m pytest -q -p no:cacheprovider -m gpu --collect-only "$@" | grep '::' || true; }
cd tests/kernels
short=$(ls test_*.py | grep -vE 'test_(decode|gather|products|seal)\.py' | sed 's|^|tests/kernels/|')
cd ../..
# shellcheck disable=SC2086
collect $short | grep -v graphs > "$cases"
for file in decode gather products seal; do
    collect "tests/kernels/test_$file.py" | awk -v every="$every" 'NR % every == 1 || every == 1' >> "$cases"
done
echo "$(wc -l < "$cases") cases, $tool, commit $(git describe --always --dirty 2> /dev/null || echo unknown)" > "$cases.log"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >> "$cases.log"
compute-sanitizer --version | tail -1 >> "$cases.log"
status=0
timeout "${SECONDS_MOST:-540}" compute-sanitizer --tool "$tool" --target-processes application-only --print-limit 20 \
    --error-exitcode 9 "$python" -m pytest -q -p no:cacheprovider -p no:xdist "@$cases" >> "$cases.log" 2>&1 || status=$?
grep -E '^[0-9]+ cases|NVIDIA|ersion|=========|passed|failed|^FAILED' "$cases.log" | tee "$log"
exit "$status"
