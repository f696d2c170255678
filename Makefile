# Thin: every target says the command it runs. Set-up goes into .venv, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a machine with an NVIDIA GPU, JAX's CUDA libraries come along.
EXTRAS ?= test$(if $(shell command -v nvidia-smi),$(comma)cuda13)
comma := ,
# What is installed: this folder, so that edits count at once, or an sdist or a wheel.
PACKAGE ?= -e ".[$(EXTRAS)]"
CPP := $(wildcard ffi/*.cc $(foreach kind,h cc cu cuh,$(wildcard ffi/*/*.$(kind) ffi/*/*/*.$(kind))) tests/native/*.h tests/native/*.cc)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard ffi/*.* ffi/*/*.* ffi/*/*/*.*)

.PHONY: demo test new-op fuzz mutate test-gpu native fuzz-native lint format docs clean

demo: $(VENV)/.installed ## train a small GPT on real text with this library's ops
	$(BIN)/python -m jax_gradops demo $(ARGS)

test: $(VENV)/.installed ## the whole test suite; what needs a GPU skips where there is none
	$(BIN)/python -P -m pytest -n auto $(ARGS)

new-op: ## NAME=softplus: the files of a new op; ARGS=--apply also names it in the lists of ops
	$(PYTHON) tests/new_op/scaffold.py $(NAME) $(ARGS)

mutate: $(VENV)/.installed ## faults, one at a time, that some test must find; half an hour and more (nightly)
	$(BIN)/python -m pip install --quiet cmake ninja nanobind
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/mutation/run.py $(ARGS)

# EXAMPLES of each test, which take half a second each.
EXAMPLES ?= 500
fuzz: $(VENV)/.installed ## relations of ever other arrays, and ever other programs around the ops
	JAX_GRADOPS_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -P -m pytest -n auto --hypothesis-profile=fuzz --hypothesis-show-statistics tests/test_fuzz.py tests/test_fuzz_programs.py $(ARGS)

# Everything that needs a GPU, in one go, with the packages that are there: nothing is downloaded.
# Builds, checks memory and races with compute-sanitizer, runs the suite and the doctor, benchmarks.
# OUT: where logs and tables go. STEPS: some of build, sanitize, check, sweep, test, doctor, bench, demo.
OUT ?= gpu_output
test-gpu:
	PYTHON=$(PYTHON) OUT=$(OUT) tests/gpu/run.sh $(STEPS)

# Longer than tests/test_native.py: optimised builds with sanitizers, large arrays, many threads.
NATIVE := $(MAKE) -C tests/native JAXLIB=$$($(BIN)/python -c 'import importlib.util as u; print(u.find_spec("jaxlib").submodule_search_locations[0])') \
  BUILD=$(CURDIR)/build/native-long
native: $(VENV)/.installed
	$(NATIVE) asan tsan
	build/native-long/asan/driver malformed memory-long threads allocations
	build/native-long/tsan/driver memory threads-long

# Call frames from bytes, with clang's libFuzzer; the corpus stays. SECONDS: how long.
SECONDS ?= 1800
fuzz-native: $(VENV)/.installed
	$(NATIVE) fuzz CXX=clang++
	mkdir -p build/native-long/corpus
	build/native-long/fuzz/fuzzer -max_len=96 -len_control=0 -timeout=60 -print_final_stats=1 \
	  -max_total_time=$(SECONDS) build/native-long/corpus

lint: $(VENV)/.dev ## formatting, lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# Warnings are errors. Then links and anchors inside the built site are followed, without the network.
docs: $(VENV)/.docs ## the documentation site, in build/docs
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees docs build/docs
	$(BIN)/python docs/_ext/site_links.py build/docs

clean:
	rm -rf build dist $(VENV) .venv-ci-*

# A folder without pip was left by a venv that failed (Debian: apt install python3-venv): made again.
$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3")'
	$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PACKAGE)
	touch $@

# The tools of the extras `dev` and `docs`, without building the library once more.
$(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*(d for d in extras["$*"] if "jax_gradops" not in d))' \
	  | xargs $(BIN)/python -m pip install --quiet
	touch $@
