# Everything sets itself up: `make run` and `make test` work on a fresh clone.
#   PY=python3.12      interpreter for the virtual environment (3.11 or newer)
#   PYTHON=python3     use this interpreter as it is, and set nothing up (it must have torch and pytest)

PY ?= python3
VENV := .venv
READY := $(VENV)/.ready
ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
SETUP := $(READY)
endif
# One thread for `run`: its kernels are too small to share. On two busy cores two threads were 15 times slower, eager too.
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))

# A library may ask the driver for what it does not have: that is no error.
SANITIZE = compute-sanitizer --report-api-errors no --error-exitcode 1

.PHONY: help run test slow soak check fuzz gpu gpu2 sanitize count bench opinfo zoo examples recipes docs dist matrix format clean
.DEFAULT_GOAL := help

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

run: $(SETUP) ## train a character LSTM, eager and as one graph in turn; prints both speeds (a minute on two cores)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON) examples/char_rnn.py

test: $(SETUP) ## the tests that need no GPU, without the slow ones (15 to 22 minutes on two cores)
	$(PYTHON) -m pytest -m "not gpu and not slow" -n auto --maxprocesses 8 --dist worksteal

slow: $(SETUP) ## the tests in tests/slow.txt: whole examples, large networks, many processes (12 minutes on two cores)
	$(PYTHON) -m pytest -m "slow and not gpu" -n auto --maxprocesses 8 --dist worksteal

fuzz: $(SETUP) ## 2,000 random steps, captured and eager, others each time: no result is ever stale (ten minutes on two cores)
	MILLSTREAM_FUZZ=2000 $(PYTHON) -m pytest -q tests/capture/guards/test_random_programs.py tests/capture/trace/test_threads.py -n auto --maxprocesses 16 --dist worksteal
	MILLSTREAM_FUZZ=200 $(PYTHON) -m pytest -q tests/capture/copies -n auto --maxprocesses 16 --dist worksteal
	MILLSTREAM_FUZZ=200 $(PYTHON) -m pytest -q tests/api/test_random_control.py -n auto --maxprocesses 16 --dist worksteal
	MILLSTREAM_FUZZ=300 $(PYTHON) -m pytest -q tests/lower/inductor/test_equal_kernels.py -n auto --maxprocesses 16 --dist worksteal
	MILLSTREAM_FUZZ=10000 $(PYTHON) -m pytest -q tests/insight/test_gaps.py
	MILLSTREAM_RANKS=8 $(PYTHON) -m pytest -q tests/parallel/test_many_ranks.py

soak: $(SETUP) ## 50 epochs of every kind of source: feeds leave no memory, threads, files or events behind (some minutes)
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.sweeps.feed_life --out benchmarks/results/soak.md

check: $(SETUP) ## lint, format, types and layers
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyrefly check --python-interpreter-path $(PYTHON)
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-logo

gpu: $(SETUP) ## the tests that need a GPU (PYTHON=python3 where torch is already installed), engines without our kernels, too
	$(PYTHON) -m pytest tests/gpu -m gpu
	MILLSTREAM_WITHOUT=own-kernels,convolution-gradients $(PYTHON) -m pytest tests/gpu/engines tests/gpu/test_kept.py tests/gpu/test_random_programs.py -m "gpu and not own_kernels"

gpu2: $(SETUP) ## the tests that need two GPUs, or take all there are
	$(PYTHON) -m pytest tests/gpu/test_data_parallel.py tests/gpu/test_many_ranks.py tests/gpu/engines/test_placed.py -m gpu

sanitize: $(SETUP) ## small networks on every engine, and our kernels, under CUDA's compute-sanitizer (three minutes on 16 cores)
	$(SANITIZE) --tool memcheck $(PYTHON) -m pytest tests/gpu/engines/test_streams.py tests/gpu/engines/test_spread.py -m gpu -n 8 -k "inference_is or training_is or spread"
	$(SANITIZE) --tool synccheck $(PYTHON) -m pytest tests/gpu/kernels/test_conv2d.py tests/gpu/kernels/test_weights.py -m gpu -n 4 -k "1-"

count: $(SETUP) ## lines by package, long files, wide functions, names for two things, import cycles
	$(PYTHON) tools/count.py

bench: $(SETUP) ## every benchmark suite, on a machine with a GPU; writes benchmarks/results/
	$(PYTHON) -m benchmarks

opinfo: $(SETUP) ## every operator of PyTorch's test database against eager, on the CPU (an hour; continues where it stopped)
	@$(PYTHON) -c "import expecttest" 2>/dev/null || $(PYTHON) -m pip install --quiet expecttest
	nice -n 19 $(PYTHON) -m benchmarks.sweeps.opinfo

zoo: $(SETUP) ## a model of every family of timm, and 60 of transformers, against eager, on the CPU (hours; continues where it stopped)
	@$(PYTHON) -c "import timm, transformers" 2>/dev/null || $(PYTHON) -m pip install --quiet --constraint constraints.txt timm transformers
	nice -n 19 $(PYTHON) -m benchmarks.sweeps.zoo

examples: $(SETUP) ## the programs in examples/, each for a few steps, with its graphs counted
	$(PYTHON) -m pytest tests/test_examples.py -n auto --maxprocesses 4

recipes: $(SETUP) ## the recipes, with the real packages (the extra `recipes`, 400 MB); any PyTorch that is there stays
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[recipes]'
	$(PYTHON) -m pytest recipes

docs: $(SETUP) ## the documentation as a site, in site/
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(PYTHON) -m mkdocs build --strict

dist: $(SETUP) ## wheel and source archive, checked, in dist/; MILLSTREAM_URL=https://… makes the README's links absolute
	$(PYTHON) -m pip install --quiet build twine
	rm -rf dist
	$(PYTHON) -m build
	$(PYTHON) -m twine check --strict dist/*

matrix: $(SETUP) ## wheels in empty environments: every Python with every PyTorch of which there is a CPU build, or that an interpreter in WITH has
	$(PYTHON) tools/matrix.py $(addprefix --with ,$(WITH))

format: $(SETUP) ## format the code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "millstream needs Python 3.11 or newer; '$(PY)' is $$($(PY) --version 2>&1). Try: make PY=python3.12" >&2; exit 2; }
	$(PY) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
