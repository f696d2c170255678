#!/usr/bin/env bash
# Everything that needs a GPU, in one go: `make test-gpu`, or tests/gpu/run.sh [step ...].
# Needs what is in `pip install ".[test]"`, jax with CUDA, nanobind, scikit-build-core and nvcc, all
# installed already: nothing is downloaded. Logs and tables go to $OUT (gpu_output).
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-gpu_output}
mkdir -p "$out"
# -P: this folder is no installation, it has no native modules.
run_python() { "$python" -P "$@"; }
export XLA_PYTHON_CLIENT_PREALLOCATE=false
failed=()

step() {
  local name=$1 log="$out/$1.log" start=$SECONDS
  shift
  echo "=== $name: $*"
  "$@" >"$log" 2>&1
  local status=$?
  tail -n "${TAIL:-12}" "$log"
  echo "=== $name: exit status $status after $((SECONDS - start)) s"
  [ $status = 0 ] || failed+=("$name")
}

build() {
  JAX_GRADOPS_CUDA=ON CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    "$python" -m pip install --no-build-isolation --no-deps --no-index -v .
}

# XLA's allocator carves buffers out of one block, which hides overruns: one cudaMalloc a buffer here.
sanitize() {
  local tool status=0
  for tool in memcheck racecheck; do
    echo "--- $tool"
    XLA_PYTHON_CLIENT_ALLOCATOR=platform timeout 200 compute-sanitizer --tool "$tool" \
      --kernel-name kernel_substring=gradops --error-exitcode 9 \
      "$python" -P tests/gpu/sanitize.py || status=$?
  done
  return $status
}

steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build sanitize test doctor bench demo)
for name in "${steps[@]}"; do
  case $name in
    build) step build build ;;
    sanitize) step sanitize sanitize ;;
    test) step test run_python -m pytest -n "${WORKERS:-8}" -q ;;
    doctor) step doctor run_python -m jax_gradops doctor ;;
    bench) TAIL=60 step bench run_python tests/gpu/benchmark.py --json "$out/benchmark.json" ;;
    demo) step demo run_python -m jax_gradops demo --compare --output "$out/demo" ;;
    *) echo "unknown step $name" >&2; exit 2 ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all of ${steps[*]} passed"
