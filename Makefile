# demo: prepare, train, evaluate and report on real text · test: the tests
# test-xla: the contracts and unit tests with torch 2.9 and torch_xla, in an environment of its own
# test-faults: the whole fault matrix, of which `test` does a part
# test-rest: the other cases that `test` leaves out: more strategies, sizes, processes, graphs
# check: style and types · bench, bench-quick: speed beside others, saves, starts, scaling, and what the loop costs
# Each target first creates .venv, once, and again when what it installs has changed.

PYTHON ?= python3
BIN := .venv/bin
FAULTS ?= full or not full
INSTALLED := .venv/.installed
COMPARED := .venv/.compared

# Tests start hundreds of processes, and each would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

XLA := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/regauge/xla

.PHONY: demo test test-xla environment-xla test-faults test-rest check bench bench-quick
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/regauge pipeline runs/quickstart.toml

# Three files at a time, and by itself what watches the clock. Threads that wait leave the processor to the others.
test test-rest test-faults: export OMP_WAIT_POLICY := PASSIVE
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/faults
	$(BIN)/python -m pytest tests/faults

environment-xla: $(XLA)/.installed

test-xla: environment-xla
	$(XLA)/bin/python -m pip install -q --no-deps -e .
	$(XLA)/bin/python -m pytest tests/contracts tests/unit

test-faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults -m "$(FAULTS)"

test-rest: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/contracts tests/unit tests/end_to_end tests/distributed -m full

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# `bench-quick` has fewer turns; both rewrite benchmarks/results.
bench bench-quick: $(COMPARED)
bench:
	$(BIN)/python benchmarks/overhead.py
	for each in train_mlm train_large train_clm train_contrastive train_rank prepare_peers checkpoint startup scaling predict chart; do \
		$(BIN)/python benchmarks/$$each.py || exit; done
bench-quick:
	$(BIN)/python benchmarks/overhead.py --alternations 10 --steps 5
	$(BIN)/python benchmarks/train_mlm.py --turns 4 --steps 3 --lengths 128 --dropouts 0.1
	for each in train_clm train_rank; do \
		$(BIN)/python benchmarks/$$each.py --turns 4 --steps 3 --peers best || exit; done
	$(BIN)/python benchmarks/train_contrastive.py --turns 4 --steps 1 --peers best
	$(BIN)/python benchmarks/prepare_peers.py --megabytes 60 --turns 3
	for each in checkpoint startup; do $(BIN)/python benchmarks/$$each.py --turns 3 || exit; done
	$(BIN)/python benchmarks/scaling.py --turns 1 --hosts 2 --cases ddp fsdp hsdp
	$(BIN)/python benchmarks/predict.py --turns 3 --count 1000 --styles default
	$(BIN)/python benchmarks/chart.py

$(COMPARED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[bench]"
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: $(PYTHON) is missing or older than Python 3.11; run: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,tensorboard,mlflow]"
	touch $@

# About 7 GB, the CUDA libraries of that torch included; every clone shares it.
$(XLA)/.installed: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install -c constraints-xla.txt -e ".[dev,tensorboard,xla]"
	touch $@
