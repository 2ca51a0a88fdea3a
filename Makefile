# The verbs of this repository; `make help` lists them. `demo`, `style` and `test` set up $(VENV) themselves.
#
#   VENV         folder of the virtual environment
#   BASE_PYTHON  interpreter that creates it
#   CONSTRAINTS  file of tested versions; empty lets pip choose within pyproject.toml's ranges
#   PINS         further requirements, for instance PINS='transformers==5.17.*'
#   WORKERS      processes `make test` uses
#   CPUS         instruction sets `make test-cpus` lets PyTorch use, one after another
#   ARGS         further arguments of the command that the verb runs
#   BENCH_ARGS   arguments of the benchmark, for instance '--sizes 32x8k'; it saves its figures by default
#   PYTHON       for `test-gpu` and `bench`: use this interpreter as it is and install nothing

VENV ?= .venv
BASE_PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
PINS ?=
WORKERS ?= 2
CPUS ?= default avx2
ARGS ?=
BENCH_ARGS ?= --json evals/results

BIN := $(VENV)/bin
# Modules are compiled when they are first imported: pip would compile all of PyTorch and Transformers, most of which is never imported.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PINS)
FOR_DEMO := $(VENV)/.installed
FOR_DEV := $(VENV)/.installed-dev
FOR_DOCS := $(VENV)/.installed-docs

ifdef PYTHON
GPU_PYTHON := $(PYTHON)
FOR_GPU :=
else
GPU_PYTHON := $(BIN)/python
FOR_GPU := $(FOR_DEV)
endif

.DEFAULT_GOAL := help
.PHONY: help demo style format test test-cpus test-gpu bench docs docs-check dist clean

help:  ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 14

# Compiled modules are kept, whatever the environment says.
demo: $(FOR_DEMO)  ## compare the schemes on the small reference model (CPU is enough)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/hfkvq demo $(ARGS)
	@echo "hfkvq is in $(BIN): source $(BIN)/activate"

style: $(FOR_DEV)  ## lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(FOR_DEV)  ## rewrite the files as `style` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Compiled modules are kept here, too: tests start some fifty processes.
test: $(FOR_DEV)  ## every test that needs no GPU and is not slow
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist worksteal --timeout 300 $(ARGS)

# By its instruction set PyTorch adds up in another order, so that a number on a rounding boundary gets another code.
test-cpus: $(FOR_DEV)  ## the tests that compare roundings, by several instruction sets of the CPU
	set -e; for each in $(CPUS); do \
	  echo "ATEN_CPU_CAPABILITY=$$each"; \
	  ATEN_CPU_CAPABILITY=$$each OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "rounding and not gpu and not slow" -n $(WORKERS) --dist worksteal --timeout 300 $(ARGS); \
	done

test-gpu: $(FOR_GPU)  ## the tests that need a CUDA device
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu $(ARGS)

bench: $(FOR_GPU)  ## time decode attention against bf16 (needs a CUDA device)
	PYTHONPATH=. $(GPU_PYTHON) evals/kernel_bench.py $(BENCH_ARGS)

docs-check: $(FOR_DEV)  ## compare the documents' generated tables with the figures (--write in ARGS writes them)
	PYTHONPATH=. $(BIN)/python evals/docs.py $(ARGS)

# The first page is the README, also for whoever opens the folder.
docs: $(FOR_DOCS)  ## guides and API reference as a site with search, in build/docs
	$(BIN)/python -m sphinx --quiet $(ARGS) -c docs . build/docs
	cp build/docs/README.html build/docs/index.html

dist: $(FOR_DEV)  ## wheel and sdist, in dist
	$(BIN)/python -m hatchling build

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find hfkvq evals tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(BASE_PYTHON) -m venv $(VENV)

# Order-only: the interpreter's own date says nothing about the packages.
$(FOR_DEMO): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(FOR_DEV): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(FOR_DEMO)

$(FOR_DOCS): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@
