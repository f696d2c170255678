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
# Without a GPU nothing here may pass on the CPU alone.
export JAX_PLATFORMS=cuda,cpu
failed=()
export script=$$

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

# Everything after the build needs both; the steps themselves are content with less.
devices() {
  run_python -c '
import sys, jax
from jax_gradops import _registry
if "cuda" not in _registry.MODULES:
    sys.exit("no CUDA kernels: " + _registry.why_unavailable("cuda"))
print(f"jax {jax.__version__}:", *(d.device_kind for d in jax.devices("gpu")))'
}

# limited SECONDS COMMAND...: in a process group of its own, all of which is killed when the command
# has ended, time is up or this script is gone: a tool's child may outlive its parent, and hang.
limited() {
  local seconds=$1 end=$((SECONDS + $1)) group status
  shift
  setsid "$@" &
  group=$!
  while kill -0 "$group" && kill -0 "$script" && [ $SECONDS -lt $end ]; do sleep 0.5; done 2>/dev/null
  kill -KILL -- "-$group" 2>/dev/null
  wait "$group"
  status=$?
  [ $SECONDS -lt $end ] || echo "killed after $seconds s"
  return $status
}

# XLA's allocator carves buffers out of one block, which hides overruns: one cudaMalloc a buffer here.
# No CUDA graphs, in which compute-sanitizer has crashed.
# TOOLS: some of memcheck, racecheck, synccheck. Not initcheck: it would need to watch XLA's kernels too,
# which takes too long; watching ours alone, it takes all that others have written as unwritten. For
# the norms, `check` below runs it.
# Racecheck itself crashes at times, at another place in each run: then it runs again.
watched() {
  local attempt status
  for attempt in 1 2 3; do
    watched_once "$@" && return
    status=$?
    [ $status = 139 ] || return $status
    echo "attempt $attempt: segmentation fault"
  done
  return $status
}

watched_once() {
  PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" \
    limited "${SANITIZE_SECONDS:-600}" compute-sanitizer --tool "$1" \
    --kernel-name kernel_substring=gradops --error-exitcode 9 \
    "$python" -P tests/gpu/sanitize.py "$2"
}

sanitize() {
  local tool dtype log code status=0
  local -A running
  for tool in ${TOOLS:-memcheck racecheck}; do
    for dtype in float32 bfloat16 float64; do
      watched "$tool" "$dtype" >"$out/$tool-$dtype.log" 2>&1 </dev/null &
      running[$dtype]=$!
    done
    for dtype in "${!running[@]}"; do
      wait "${running[$dtype]}"
      code=$?
      log=$out/$tool-$dtype.log
      [ $code = 0 ] && grep -q "^ran every kernel" "$log" || status=1
      echo "--- $tool $dtype: exit status $code, $log: $(tail -n 1 "$log")"
    done
  done
  return $status
}

# The kernels without JAX, on buffers of exact size, under all four tools. DRIVERS: a folder with
# check_norms, check_batch_norm, check_gelu, check_clip, check_cross_entropy and check_embedding, compiled; otherwise
# that is done here, in six minutes.
# TOOLS: some of them. CHECKS: a pattern of the runs' names: racecheck-bf16-9, say, racecheck-f64-9-5,
# memcheck.* or .*-entropy-.*
driver() {
  if [ -n "${DRIVERS:-}" ]; then
    echo "$DRIVERS/$1"
    return
  fi
  nvcc -std=c++20 -arch=native -O3 -lineinfo --expt-relaxed-constexpr -Iffi \
    -isystem "$(run_python -c 'import jax.ffi; print(jax.ffi.include_dir())')" \
    "tests/gpu/$1.cu" -o "$out/$1" && echo "$out/$1"
}

# One line a run: name, tool, command. The slowest come first, and in parts.
checks() {
  local norms batch gelu clip entropy embedding tool dtype number parts numbers plan
  norms=$(driver check_norms) && batch=$(driver check_batch_norm) && gelu=$(driver check_gelu) &&
    clip=$(driver check_clip) && entropy=$(driver check_cross_entropy) &&
    embedding=$(driver check_embedding) || return
  for tool in ${TOOLS:-racecheck memcheck initcheck synccheck}; do
    echo "$tool-gelu $tool $gelu"
    echo "$tool-clip $tool $clip"
    echo "$tool-embedding $tool $embedding"
    echo "$tool-batch $tool $batch"
    echo "$tool-batch-dynamic $tool $batch dynamic"
    case $tool in
      racecheck) parts="-variant" numbers="0 1 2 3 4 5 6 7 8 9 10 11" ;;
      *) parts="-plan" numbers="0 1 2 3 4 5 6" ;;
    esac
    for dtype in f64 f32 bf16 f16; do
      echo "$tool-entropy-$dtype $tool $entropy $dtype"
      for number in $numbers; do
        [ "$tool-$number" = synccheck-5 ] && continue # check_norms.cu says why
        if [ "$tool-$dtype" = racecheck-f64 ]; then # a variant whole takes ten minutes
          for plan in 0 1 2 3 4 5 6; do
            echo "$tool-$dtype-$number-$plan $tool $norms $dtype -variant $number -plan $plan"
          done
          continue
        fi
        echo "$tool-$dtype-$number $tool $norms $dtype $parts $number"
      done
    done
  done
}

# run_check NAME TOOL COMMAND...: on one of the GPUs.
run_check() {
  local name=$1 tool=$2 log="$out/check-$1.log" status start=$SECONDS
  shift 2
  kill -0 "$script" || return
  CUDA_VISIBLE_DEVICES=$((SLOT % gpus)) limited "${SANITIZE_SECONDS:-600}" \
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" >"$log" 2>&1 </dev/null
  status=$?
  grep -q "^ran everything" "$log" || status=1
  echo "--- $name: exit status $status after $((SECONDS - start)) s: $(tail -n 1 "$log")"
  [ $status = 0 ] # whatever it was: xargs ends at 255
}

# A few at a time on each GPU: they share its time, and all at once none ends.
check() {
  local gpus
  gpus=$(nvidia-smi -L | wc -l)
  checks >"$out/checks.txt" || return
  export -f run_check limited
  export out gpus
  grep -E "^(${CHECKS:-.*}) " "$out/checks.txt" |
    xargs -r -P $((gpus * 5)) --process-slot-var=SLOT -L 1 \
      bash -c 'trap "" INT TERM; run_check "$@"' run_check | tee "$out/check-all.txt"
  local status=$?
  grep -v "exit status 0" "$out/check-all.txt"
  return $status
}

# GELU's float formulas on all 2^32 floats.
sweep() {
  local gelu
  gelu=$(driver check_gelu) && "$gelu" sweep
}

finish() {
  if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED: ${failed[*]}"
    exit 1
  fi
  echo "all of ${steps[*]} passed"
  exit 0
}

steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build sanitize check sweep test doctor bench demo)
checked=
for name in "${steps[@]}"; do
  if [ "$name" != build ] && [ ! $checked ]; then
    step devices devices
    [ ${#failed[@]} = 0 ] || finish
    checked=yes
  fi
  case $name in
    build) step build build ;;
    sanitize) step sanitize sanitize ;;
    check) TAIL=40 step check check ;;
    sweep) step sweep sweep ;;
    test)
      step test run_python -m pytest -n "${WORKERS:-8}" -q -m "not large"
      XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 \
        step large run_python -m pytest -q -m large
      ;;
    doctor) step doctor run_python -m jax_gradops doctor ;;
    bench)
      TAIL=60 step bench run_python -m jax_gradops bench --device gpu \
        --shape 32768x4096,256x14x14x1024 --dtype bfloat16,float32 --json "$out/bench.json"
      ;;
    demo) step demo run_python -m jax_gradops demo --compare --output "$out/demo" ;;
    *) echo "unknown step $name" >&2; exit 2 ;;
  esac
done
finish
