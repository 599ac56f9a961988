# Everything runs in .venv, which the first target that needs it makes. Needs Python >= 3.11 and make.
PYTHON ?= python3
WORKERS ?= 2
# Seconds after which a test fails; the longest takes 70 on two busy cores.
LIMIT := --timeout 300
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# make demo INDEX=https://download.pytorch.org/whl/cpu takes torch without CUDA: 1 GB instead of 5.5 GB on Linux.
INDEX ?=
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(INDEX),--extra-index-url $(INDEX))

# The golden numbers of tests/null are of this release, in its build for CUDA.
NULL_TORCH := 2.14.1
NULL_VENV := .venv-null
NULL_STAMP := $(NULL_VENV)/.torch-$(NULL_TORCH)

.PHONY: test-matrix dist help demo test test-all lint style types suite suite-fast test-cluster test-foreign test-null docs reference tutorials linkcheck bench fuzz faults ops-sweep clean

help:
	@echo "make demo   run the main job: an array of CNNs on real handwritten digits"
	@echo "make test   lint, types, import contracts, and the tests that take three minutes together"
	@echo "make test-all  the same with all tests: what CI runs"
	@echo "make lint   the same without the tests"
	@echo "make test-cluster  the tests that start Ray, or many processes, on this machine"
	@echo "make test-matrix   a smoke selection for PYTHONS and TORCHES"
	@echo "make dist   build the wheel and the sdist, and check them"
	@echo "make test-foreign  models of other packages, trained fused and alone"
	@echo "make test-null  torch's CUDA build on a device that computes nothing: launches, waits and graphs are counted (5.5 GB)"
	@echo "make docs   build the pages as a site in build/docs; warnings are errors"
	@echo "make reference  write the API part of docs/reference from the docstrings"
	@echo "make tutorials  run the tutorials, and write what they print and draw into their pages"
	@echo "make linkcheck  open every link of the pages to another site (needs a network)"
	@echo "make bench  compare fused and unfused training (ARGS='--quick' passes arguments on)"
	@echo "make fuzz   random programs and acts, fused against alone (SECONDS=600 SEED=1 COMPILED=1)"
	@echo "make faults plant the faults of tests/planted_faults.toml in a copy, one at a time, and see which tests find them"
	@echo "make soak   10,000 damaged checkpoints; 200 killed runs; 200 faults of clusters (FILES= KILLS= CLUSTER_FAULTS=)"
	@echo "make ops-sweep  compare every operator of PyTorch's database, and write docs/reference/coverage.md"
	@echo "make clean  remove .venv and every cache"

demo: $(VENV)/.demo
	$(BIN)/python examples/digits_sweep.py

# Types use one core only, and for half a minute without a cache: tests run beside them.
test: style
	$(MAKE) --jobs=2 types suite-fast

test-all: style
	$(MAKE) --jobs=2 types suite

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# One thread for each test: processes that tests start would share the cores with those of other tests.
suite: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LIMIT) --numprocesses $(WORKERS) --durations=40

# Without those of tests/slow_tests.txt.
suite-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LIMIT) --fast --numprocesses $(WORKERS)

test-cluster: $(VENV)/.cluster
	RAY_AUTH_MODE=disabled $(BIN)/python -m pytest -m cluster tests/cluster tests/tune

test-foreign: $(VENV)/.foreign
	$(BIN)/python -m pytest -m foreign tests/foreign

# PYTHONS="python3.11 python3.12" TORCHES="2.11.0 2.14.1": a smoke selection in a separate environment for each pair.
# KEEP=1 keeps the environments, of about 5 GB each on Linux.
PYTHONS ?= $(PYTHON)
TORCHES ?= 2.11.0 2.14.1
SMOKE := tests/test_training.py tests/test_main.py tests/test_import.py tests/schedule tests/test_refusals.py \
	tests/array/test_torch_compile.py tests/test_forwards.py
test-matrix:
	@set -e; for python in $(PYTHONS); do for torch in $(TORCHES); do \
		version=$$($$python -c 'import sys; print("{}.{}.{}".format(*sys.version_info))'); \
		folder=build/matrix/python$$version-torch$$torch; \
		echo "== Python $$version, torch $$torch"; \
		$$python -m venv $$folder; \
		$$folder/bin/python -m pip install --quiet $(if $(INDEX),--extra-index-url $(INDEX)) \
			--editable . "torch==$$torch" pytest hypothesis expecttest matplotlib "optuna>=4.0"; \
		$$folder/bin/python -m pytest -q $(SMOKE); \
		$(if $(KEEP),:,rm -rf $$folder); \
	done; done

dist: $(STAMP)
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# The device is built for the CUDA build of torch, which the pinned one of .venv is not.
test-null: $(NULL_STAMP)
	tests/null/device/build.sh $(NULL_VENV)/bin/python build/null
	HFUSION_NULL_CUDA=build/null tests/null/run.sh $(NULL_VENV)/bin/python -m pytest -m null tests/null
	NULL_DEVICES=8 HFUSION_NULL_CUDA=build/null tests/null/run.sh $(NULL_VENV)/bin/python -m pytest -m null tests/null/test_train.py

docs: $(VENV)/.docs
	$(BIN)/codespell --ignore-words-list coo --skip '*.json,*.svg,*.png' README.md CONTRIBUTING.md CHANGELOG.md docs ops/README.md
	$(BIN)/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet docs build/docs
	@echo "build/docs/index.html"

reference: $(STAMP)
	$(BIN)/python docs/api_reference.py

tutorials: $(STAMP)
	$(BIN)/python docs/tutorial_outputs.py

linkcheck: $(VENV)/.docs
	$(BIN)/sphinx-build --builder linkcheck --fail-on-warning --keep-going --quiet docs build/linkcheck

bench: $(STAMP)
	$(BIN)/python -m hfusion.bench $(ARGS)

SECONDS ?= 600
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(COMPILED),--compiled)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.acts.walk --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

FILES ?= 10000
KILLS ?= 200
# Of each of two kinds of runs.
CLUSTER_FAULTS ?= 50
soak: $(VENV)/.cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint.damage --files $(FILES)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore::DeprecationWarning -m tests.checkpoint.killed --kills $(KILLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cluster.random_faults --faults $(CLUSTER_FAULTS)

# FAULTS: names of some, by default all.
faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.planted_faults --workers $(WORKERS) $(FAULTS)

ops-sweep: $(STAMP)
	$(BIN)/python -m tests.ops.sweep --docs docs/reference/coverage.md

clean:
	rm -rf $(VENV) $(NULL_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment without a package, so that the demo does not wait for the tools of tests.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	sys.exit(None if sys.version_info >= (3, 11) else f"hfusion needs Python >= 3.11, $(PYTHON) is {v}: try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[demo]'
	touch $@

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,examples]'
	touch $@

$(NULL_STAMP): pyproject.toml
	$(PYTHON) -m venv $(NULL_VENV)
	$(NULL_VENV)/bin/python -m pip install --quiet --editable . torch==$(NULL_TORCH) cloudpickle hypothesis optuna pytest
	touch $@

$(VENV)/.cluster: $(STAMP)
	$(PIP) --editable '.[cluster]'
	touch $@

$(VENV)/.foreign: $(STAMP)
	$(PIP) --editable '.[foreign]'
	touch $@

$(VENV)/.docs: $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $@
