# Each target works from a fresh clone with Python 3.10+ and make alone.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-all check docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## nine rows on corrupted digits: a table, and a page
	$(BIN)/poem demo

check: $(VENV)/.dev  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## check, then every test that takes seconds
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: check  ## the slow ones too
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow"

docs: $(BIN)/python  ## the pages, as HTML in docs/_build/html
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) dist docs/_build .mypy_cache .ruff_cache .pytest_cache
