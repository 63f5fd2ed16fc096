# demo: prepare, train, evaluate and report on real text · test: the tests
# check: style and types · bench: the measurements of benchmarks/
# Each target first creates .venv, once, and again when what it installs has changed.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check bench
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/regauge pipeline runs/quickstart.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overhead.py

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: $(PYTHON) is missing or older than Python 3.11; run: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,tensorboard]"
	touch $@
