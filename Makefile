# `make demo` and `make test` work on a fresh machine: each first makes .venv, with the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUT ?= runs/demo

.PHONY: help setup demo test lint types layers check clean

help:  ## What there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */\1	/'

setup: $(STAMP)  ## Make .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11; use: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[search,lora,dev]'
	@touch $@

demo: $(STAMP)  ## The main job: base -> SFT -> RL with a real 135M model, in minutes
	$(BIN)/upswing run recipes/demo.yaml --out $(DEMO_OUT) --resume

test: $(STAMP)  ## All tests
	$(BIN)/python -m pytest

lint: $(STAMP)  ## Style, and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## Type checks
	$(BIN)/mypy

layers: $(STAMP)  ## Imports point down only
	$(BIN)/lint-imports

check: lint types layers  ## Everything but the tests

clean:  ## Remove .venv and caches; runs are kept
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
