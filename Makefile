# Each target works from a fresh clone with Python 3.10+ and make alone.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
WORKERS ?= 2
OLDEST ?= .venv-oldest

.PHONY: demo test test-all test-oldest check study-check docs clean

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

# numpy: the interpreter of that torch's Triton, which tests of kernels use, does not run under 2.4.
$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet "torch==2.6.*" "torchvision==0.21.*" "numpy<2.3" \
		-e ".[bench,demo]" pytest pytest-xdist hypothesis torchmetrics
	touch $@

test-oldest: $(OLDEST)/.installed  ## the engine, accelerations, guard and contract on the oldest torch that is promised
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/accelerate tests/engine tests/guarded \
		tests/parts tests/recipes tests/test_adapter.py tests/test_contract.py

study-check: $(VENV)/.dev  ## two cells of the study measured again on this machine; POEM_DATA holds CIFAR-10
	PYTHONPATH=src:benchmarks $(BIN)/python -m study.check --suites cifar10

docs: $(BIN)/python  ## the pages, as HTML in docs/_build/html
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) $(OLDEST) dist docs/_build .mypy_cache .ruff_cache .pytest_cache
