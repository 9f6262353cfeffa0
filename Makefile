# Each target makes .venv, installs what it needs once, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.core
	$(BIN)/hacrl demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hacrl into $(VENV) (a few minutes, once)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the extras for tests and checks (once)"
	$(INSTALL) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
