# Every target sets up what it needs; nothing is done twice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test test-fast check bench soak mutants dist clean
help:
	@echo "make demo      train a small LLaMA twice, with and without deaths and returns, and draw both"
	@echo "make test      all tests (minus the soaks)"
	@echo "make test-fast those that start no process: two minutes on two cores"
	@echo "make check     ruff (format, lint) and mypy"
	@echo "make bench     all benchmarks and one page of them, runs/bench/index.html: half an hour"
	@echo "make soak      the long tests"
	@echo "make mutants   break the code on purpose, piece by piece, and show which test notices; SHARD=2/4: a quarter of it"
	@echo "make dist      a wheel and an sdist, in dist/"
	@echo "make setup     only the virtual environment"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ReCoVer needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/recover demo

# Tests that start processes are alone on the machine, one after the other; all others share its cores.
test: setup
	$(BIN)/python -m pytest -m "pure or simulated" --numprocesses auto
	$(BIN)/python -m pytest -m processes

test-fast: setup
	$(BIN)/python -m pytest -m "(pure or simulated) and not slow" --numprocesses auto

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/recover bench all

soak: setup
	$(BIN)/python -m pytest -m soak

mutants: setup
	$(BIN)/python tests/mutate.py $(if $(SHARD),--shard $(SHARD))

dist: setup
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
