"""What `plan` asks strategies and tasks: bytes as in `train --dry-run`, and facts that are true."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from distributed import datasets
from distributed.runs import TASKS, settings
from regauge import config
from regauge.data.dataset import Dataset, DatasetRows, ExtendedRows
from regauge.data.loader import CollatorConfig
from regauge.machines.machine_rates import find_machine
from regauge.planner.memory_plan import layer_activation_bytes, state_bytes
from regauge.planner.run_plans.option_search import plan_option
from regauge.planner.run_plans.plan_document import describe_plan, round_digits
from regauge.planner.run_plans.run_request import read_request
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.processes import World
from regauge.tasks import Task
from regauge.training.batch_finder import model_size
from regauge.training.batch_finder.memory import estimate_row_bytes, measure_module
from regauge.training.settings import Execution, TrainSettings
from regauge.training.state_bytes import RunWeights
from regauge.training.strategies import Strategy, UpdateTraffic
from regauge.training.task_runtime import build_module

if TYPE_CHECKING:
    from regauge.training.batch_finder.model_size import ModelSize

PROCESSES = 4
PRECISIONS = sorted({*get_args(Execution.model_fields["precision"].annotation)} - {"auto"})
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("mlm", {}),
    "bert, LoRA": ("mlm", {"lora": {"rank": 3}}),
    "bert, last block": ("last-layer", {}),
    "llama": ("llama", {}),
    "llama, LoRA": ("llama", {"lora": {"rank": 3, "targets": ("q_proj", "down_proj")}}),
    "gpt2, LoRA": ("clm", {"lora": {"rank": 3}}),
}
OPTIMIZERS = {"sgd": "llama", "adafactor": "bert, LoRA"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_packed(tmp_path_factory.mktemp("plans") / "data")


@cache
def build_size(model: str, data: Path) -> ModelSize:
    """Return the weights of a model's module on the meta device."""
    task, table = MODELS[model]
    run = settings(data.parent / "run", data, task, model=table)
    return measure_module(run, [Dataset(data).manifest])


def compare(run: TrainSettings, size: ModelSize) -> None:
    """Compare the states of the plan with those of the module, and the two documents."""
    precision, strategy = run.execution.precision, run.strategy
    assert strategy is not None
    expected = RunWeights(size.weights, run.optimizer.kind).measure(strategy, PROCESSES, precision)
    request = read_request(config.dump(run), Path("run.json"))
    job = request.place(PROCESSES)
    assert job is not None
    weights, gradients, optimizer = state_bytes(job, PROCESSES)
    assert weights == expected.weights
    assert gradients == expected.gradients
    assert optimizer == expected.master_weights + expected.optimizer_state
    dry_run = model_size.describe_model(run)["memory_gb_per_process"]
    machine = dataclasses.replace(find_machine("g5.12xlarge"), devices=PROCESSES)
    plan = describe_plan(request, plan_option(request, job, machine, 1))
    parts = {part["part"]: part["gb"] for part in plan["memory"]}
    for name, size_bytes in (("weights", weights), ("gradients", gradients)):
        assert parts[name] == round_digits(size_bytes / 1e9)
        assert dry_run[name] == round(size_bytes / 1e9, 6)
    assert parts["optimizer"] == round_digits(optimizer / 1e9)
    states = dry_run["master_weights"] + dry_run["optimizer_state"]
    assert states == pytest.approx(optimizer / 1e9, abs=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", choices.names("strategies"))
def test_plan_and_dry_run_agree_on_the_bytes_of_states(
    strategy: str, model: str, precision: str, data: Path
) -> None:
    task, table = MODELS[model]
    changes = {"strategy": strategy, "execution": {"precision": precision, "processes": PROCESSES}}
    run = settings(data.parent / "run", data, task, model=table, **changes)
    compare(run, build_size(model, data))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_moments_of_the_optimizer_are_those_of_the_run(kind: str, data: Path) -> None:
    task, table = MODELS[OPTIMIZERS[kind]]
    changes = {"strategy": "zero1", "optimizer": {"kind": kind}}
    execution = {"precision": "bf16", "processes": PROCESSES}
    run = settings(data.parent / "run", data, task, model=table, execution=execution, **changes)
    compare(run, build_size(OPTIMIZERS[kind], data))


def measure_block(task: str, precision: str, data: Path, changes: dict[str, Any]) -> float:
    """Return the bytes that autograd saves in one block for a row, on the meta device."""
    sizes = []
    for layers in (1, 2):
        key = "n_layer" if task == "clm" else "num_hidden_layers"
        table = {**TASKS[task]["model"], **changes, "attention": "eager"}
        table["config"] = {**table["config"], key: layers}
        run = settings(data.parent / "run", data, task, model=table)
        module = build_module(run, [Dataset(data).manifest])
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        sizes.append(estimate_row_bytes(run, Dataset(data), module, dtype))  # type: ignore[arg-type]
    return float(sizes[1] - sizes[0])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("task", "dropout"), [("mlm", 0.0), ("mlm", 0.1), ("clm", 0.0), ("clm", 0.1), ("llama", 0.0)]
)
def test_a_plan_stores_what_autograd_saves(
    task: str, dropout: float, precision: str, data: Path
) -> None:
    """The planned bytes of a block are those saved, besides the statistics of its norms."""
    changes = {"dropout": dropout} if task != "llama" else {}
    table = {**TASKS[task]["model"], **changes, "attention": "eager"}
    execution = {"precision": precision, "compile": "off"}
    run = settings(data.parent / "run", data, task, model=table, execution=execution)
    request = read_request(config.dump(run), Path("run.json"))
    planned = layer_activation_bytes(dataclasses.replace(request.job, micro_batch=1))
    assert planned == pytest.approx(measure_block(task, precision, data, changes), rel=0.02)


@pytest.mark.parametrize("name", choices.names("strategies"))
def test_a_strategy_sends_the_gradients_unless_it_has_one_process(name: str) -> None:
    strategy: Strategy = choices.load("strategies", name)()
    traffic = UpdateTraffic(weights=8e9, gradients=6e9, passes=3, layers=10)
    transfers = strategy.communication(traffic)
    assert bool(transfers) == (strategy.obstacle(World(size=PROCESSES), "adamw") is None)
    for transfer in transfers:
        assert transfer.size in (traffic.weights, traffic.gradients)
        assert transfer.messages > 0
        assert transfer.times > 0
    shards = strategy.count_shards(PROCESSES)
    assert all(1 <= number <= PROCESSES for number in shards)
    assert (shards.weights > 1) == (strategy.gather_unit != "none")


def test_no_two_strategies_are_equally_simple() -> None:
    loaded = [choices.load("strategies", name) for name in choices.names("strategies")]
    assert len({strategy.complexity for strategy in loaded}) == len(loaded)


class RecordedDataset(Dataset):
    """A dataset that records the columns which a task reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names: set[str] = set()

    def rows(self, name: str) -> DatasetRows:
        return RecordedRows(super().rows(name), self.names)


class RecordedRows(ExtendedRows):
    """Rows that record the columns which are read."""

    def __init__(self, rows: DatasetRows, names: set[str]) -> None:
        super().__init__(rows, {})
        self._names = names

    def take(self, numbers: Any) -> list[dict[str, Any]]:
        return [RecordedRow(row, self._names) for row in super().take(numbers)]


class RecordedRow(dict[str, Any]):
    """A row that records its keys."""

    def __init__(self, row: dict[str, Any], names: set[str]) -> None:
        super().__init__(row)
        self._names = names

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        self._names.add(name)
        return super().get(name, default)


RUNS = [*choices.names("tasks"), "next-sentence", "negatives", "apart"]


@pytest.mark.parametrize("name", RUNS)
def test_a_task_reads_the_text_columns_that_it_declares(name: str, tmp_path: Path) -> None:
    task: Task = config.parse_choice("tasks", TASKS[name]["task"])
    data = RecordedDataset(datasets.WRITERS[task.row_layout()](tmp_path / "data"))
    columns = data.manifest.columns
    candidates = max(column.max_group_size for column in columns.values())
    collator = CollatorConfig(100, 0, 1, (0, 1, 2), candidates)
    datasets.read_first_batch(task.resolve_defaults(data.manifest), data, collator)
    texts = {key for key, column in columns.items() if column.kind == "tokens"}
    assert data.names & texts == {*task.text_columns()}


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_counts_the_parameters_of_the_module(name: str, tmp_path: Path) -> None:
    """Their number is exact for the heads of BERT and of causal models, and for `rank`."""
    task: Task = config.parse_choice("tasks", TASKS[name]["task"])
    path = datasets.WRITERS[task.row_layout()](tmp_path / "data")
    run = settings(tmp_path / "run", path, name)
    request = read_request(config.dump(run), tmp_path / "run.json")
    with torch.device("meta"):
        module = build_module(run, [Dataset(path).manifest])
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert request.job.shape.parameters(request.job.head) == counted


class Bare(Task):
    """A task of a user that declares nothing."""

    kind = "bare"


@pytest.mark.parametrize("ask", [lambda task: task.head, lambda task: task.text_columns()])
def test_a_task_without_these_facts_is_refused(ask: Any) -> None:
    with pytest.raises(SettingsError, match="the task 'bare' does not declare") as caught:
        ask(Bare())
    assert caught.value.remedy.endswith("in Bare")
