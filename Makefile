# Everything happens in .venv; PYTHON chooses the interpreter that it is made with (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint types unit coverage clean

demo: $(READY)
	$(BIN)/python scripts/demo.py

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2

# The same tests, slower, with the lines that they reach.
coverage: $(READY)
	$(BIN)/pytest -n 2 --cov --cov-report=term

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv .demo .mypy_cache .ruff_cache .pytest_cache .coverage
