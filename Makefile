# `make demo` and `make test` work on a fresh machine: each first makes .venv, with the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
DEMO_OUT ?= runs/demo

.PHONY: help setup dev demo test lint types layers check clean

help:  ## What there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */\1	/'

setup: $(STAMP)  ## Make .venv with what the demo needs

dev: $(DEV)  ## Add what tests and checks need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11; use: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e '.[search]'
	@touch $@

$(DEV): $(STAMP)
	$(PIP) -e '.[search,lora,dev]'
	@touch $@

demo: $(STAMP)  ## The main job: base -> SFT -> RL with a real 135M model, in minutes
	$(BIN)/upswing run recipes/demo.yaml --out $(DEMO_OUT) --resume

test: $(DEV)  ## All tests
	$(BIN)/python -m pytest

lint: $(DEV)  ## Style, and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)  ## Type checks
	$(BIN)/mypy

layers: $(DEV)  ## Imports point down only
	$(BIN)/lint-imports

check: lint types layers  ## Everything but the tests

clean:  ## Remove .venv and caches; runs are kept
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
