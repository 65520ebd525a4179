# `make help` lists the targets. Each one makes .venv and installs by itself when needed, so a fresh clone can start
# with any of them.

PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := modeling_dsx_encoder scripts tests
# One worker per core, at most four: each holds its own copy of torch. A file stays on one worker, with its fixtures.
PYTEST_FLAGS ?= --numprocesses auto --maxprocesses 4 --dist loadfile
# Tests and demo read only what is installed, and the workers share the cores already.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all benchmark check fix clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamp is touched last: an installation that stopped half-way starts again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; \
	this is %d.%d. Name another one: make PYTHON3=python3.12 ..." % sys.version_info[:2])'
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON3) -m venv $(VENV)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

install: $(STAMP) ## make .venv with everything in it

demo: $(STAMP) ## from nothing to a fine-tuned Chinese sentiment classifier
	$(OFFLINE) $(PYTHON) scripts/demo.py

test: $(STAMP) ## the fast tests
	$(OFFLINE) OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(PYTEST_FLAGS)

test-all: $(STAMP) ## the slow tests too
	$(OFFLINE) OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(PYTEST_FLAGS) -m "not gpu and not network"

benchmark: $(STAMP) ## speed and memory beside stock encoders, into runs/benchmark
	$(OFFLINE) $(PYTHON) scripts/benchmark.py

check: $(STAMP) ## report style faults, change nothing
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)

fix: $(STAMP) ## repair the style faults that can be repaired
	$(PYTHON) -m ruff check --fix $(SOURCES)
	$(PYTHON) -m ruff format $(SOURCES)

clean: ## remove the environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
