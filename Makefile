# Every target sets up what it needs; nothing is done twice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
INTEGRATIONS := .venv-integrations
DOCS   := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: help setup demo test test-fast test-integrations check docs reference bench soak mutants dist clean
help:
	@echo "make demo      train a small LLaMA twice, with and without deaths and returns, and draw both"
	@echo "make test      the core suite (minus the soaks): 20 minutes on two cores; names its slowest tests"
	@echo "make test-fast those that start no process: two minutes on two cores"
	@echo "make test-integrations  tests of the lab, and with other trainers' packages, in an environment of their own"
	@echo "make check     ruff (format, lint), mypy, and the documentation in strict mode"
	@echo "make docs      the documentation site, in site/"
	@echo "make reference the generated pages of docs/reference, from the code"
	@echo "make bench     all benchmarks and one page of them, runs/bench/index.html: half an hour"
	@echo "make soak      the long tests"
	@echo "make mutants   break the code on purpose, piece by piece, and show which test notices; SHARD=2/4: a quarter of it"
	@echo "make dist      wheels and sdists of recover-train and recover-lab, in dist/"
	@echo "make setup     only the virtual environment"

setup: $(STAMP)

# environment, constraints, extra, further packages
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ReCoVer needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet -c $(2) -e '.[$(3)]' $(4)
	touch $@
endef

$(STAMP): pyproject.toml tools/pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,dev,-e tools)

$(INTEGRATIONS)/.installed: pyproject.toml constraints-integrations.txt
	$(call install,$(INTEGRATIONS),constraints-integrations.txt,integrations,)

demo: setup
	$(BIN)/recover demo

# A test that starts processes often waits, for a lease or for a slow start: three at a time keep two cores busy.
test: setup
	$(BIN)/python -m pytest -m "pure or simulated" --numprocesses auto --durations=30
	$(BIN)/python -m pytest -m processes --numprocesses 3 --dist loadfile --durations=30

test-fast: setup
	$(BIN)/python -m pytest -m "(pure or simulated) and not slow" --numprocesses auto

test-integrations: setup $(INTEGRATIONS)/.installed
	$(BIN)/python -m pytest tests/lab --durations=10
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations --durations=10

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(DOCS)

# The reference pages are committed; a test fails where they are out of date.
reference: setup
	$(BIN)/python tools/generate_reference.py
	$(BIN)/python tests/guarantees.py

docs: reference
	$(DOCS)
	@echo "open site/index.html"

bench: setup
	$(BIN)/recover bench all

soak: setup $(INTEGRATIONS)/.installed
	$(BIN)/python -m pytest -m soak tests/pure tests/simulated tests/processes tests/lab
	$(INTEGRATIONS)/bin/python -m pytest -m soak tests/integrations

mutants: setup $(INTEGRATIONS)/.installed
	$(BIN)/python tests/mutate.py $(if $(SHARD),--shard $(SHARD))

dist: setup
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist .
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist tools

clean:
	rm -rf $(VENV) $(INTEGRATIONS) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist site
