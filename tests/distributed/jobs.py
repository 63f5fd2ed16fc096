"""Jobs for the processes of a shared world; `World.run` calls one function on all ranks.

A test may also call them in its own process, as a run of one process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import BertConfig, BertModel

from distributed.host_operations import refuse_host_operations
from distributed.runs import settings
from regauge.accelerators import wait_for_all
from regauge.accelerators.cpu import Cpu
from regauge.config import build, dump, merge
from regauge.data.loader import BatchLoader
from regauge.models.dropout import CounterDropout, DropoutKeys, RowKeys
from regauge.system import processes
from regauge.system.errors import RegaugeError
from regauge.training import optimizer as optimizers
from regauge.training import run as running
from regauge.training import trainer
from regauge.training.batch_finder.model_size import describe_model
from regauge.training.checkpoint.loading import load_checkpoint
from regauge.training.compile import decision
from regauge.training.compile.warmup import RecompileMonitor
from regauge.training.context import RunContext
from regauge.training.defaults import resolve_defaults
from regauge.training.dry_run import plan_run
from regauge.training.gradients import GradientComputer
from regauge.training.metrics import memory_by_content
from regauge.training.run import attempt
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings
from regauge.training.state import TrainState

M_MMAP_THRESHOLD = -3
"""Option of mallopt: larger blocks are returned to the system when they are freed."""
Lines = list[dict[str, float]]
Step = tuple[int, list[list[tuple[int, int]]]]
"""The number of a step, and (row, part) of every text in every microbatch of one process."""


def train(folder: str, data: str, task: str, changes: dict[str, Any]) -> Lines:
    """Train a tiny model in this world; return the lines of metrics.jsonl."""
    run = settings(Path(folder), Path(data), task, **changes)
    is_on_host = run.accelerator is None or run.accelerator.on_host
    with nullcontext() if is_on_host else refuse_host_operations():
        attempt(run, processes.detect_world())
    _barrier()
    return lines(Path(folder))


def train_in_fp8(folder: str, data: str, task: str, changes: dict[str, Any]) -> Lines:
    """Train in fp8, which the CPU computes in fp32 from rounded factors; return the lines."""
    with (
        patch.object(Cpu, "fp8_obstacle", lambda _: None),
        patch.object(Cpu, "emulates_fp8", new=True),
    ):
        return train(folder, data, task, merge({"execution": {"precision": "fp8"}}, changes))


def train_to_limit(folder: str, data: str, task: str, changes: dict[str, Any]) -> tuple[int, str]:
    """Train to a limit; return the exit code and the message of the error."""
    try:
        attempt(settings(Path(folder), Path(data), task, **changes), processes.detect_world())
    except RegaugeError as error:
        return error.exit_code, str(error)
    return 0, ""


def train_recording_rows(folder: str, data: str, task: str, changes: dict[str, Any]) -> list[Step]:
    """Train; return the rows that this process computed, by step."""
    run = settings(Path(folder), Path(data), task, **changes)
    with _record_rows(run) as steps:
        attempt(run, processes.detect_world())
    _barrier()
    return steps


@contextmanager
def _record_rows(run: TrainSettings) -> Iterator[list[Step]]:
    kind, steps = type(run.task), []
    build_batch, accumulate = kind.build_batch, GradientComputer.accumulate_gradients

    def build_named_batch(
        self: Any, rows: Any, plan: Any, draw: Any, config: Any
    ) -> dict[str, np.ndarray]:
        names = {"rows": plan.row_numbers, "parts": plan.text_numbers}
        batch = build_batch(self, rows, plan, draw, config)
        return {**batch, **names, "step": np.array([draw.step])}

    def record_rows(self: GradientComputer, batches: list[Any], *rest: Any) -> torch.Tensor:
        texts = [list(zip(b["rows"].tolist(), b["parts"].tolist(), strict=True)) for b in batches]
        steps.append((int(batches[0]["step"]), texts))
        return accumulate(self, batches, *rest)

    with (
        patch.object(kind, "build_batch", build_named_batch),
        patch.object(GradientComputer, "accumulate_gradients", record_rows),
    ):
        yield steps


def hash_saved_states(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> dict[int, dict[str, str]]:
    """Train; return the hash of every unsharded tensor in memory, at each saved step."""
    hashes: dict[int, dict[str, str]] = {}
    save = trainer.save_checkpoint

    def hash_and_save(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
        hashes[state.step] = _hash_state(state)
        save(context, state, metrics)

    with patch.object(trainer, "save_checkpoint", hash_and_save):
        attempt(settings(Path(folder), Path(data), task, **changes), processes.detect_world())
    return hashes


def hash_loaded_states(
    folder: str, data: str, task: str, changes: dict[str, Any], checkpoints: list[str]
) -> list[dict[str, str]]:
    """Load checkpoints one after the other into one run; return the hashes after each."""
    hashes = []
    with _leave_new_group():
        state = _set_up(folder, data, task, changes)[1]
        optimizers.prime_state(state.optimizer)
        for checkpoint in checkpoints:
            document = load_checkpoint(Path(checkpoint), state.tensors())
            count = document["optimizer_steps"]
            optimizers.set_step_count(state.optimizer, state.model.masters(), count)
            hashes.append(_hash_state(state))
    return hashes


def _set_up(folder: str, data: str, task: str, changes: dict[str, Any]) -> Run:
    world = processes.detect_world()
    run = settings(Path(folder), Path(data), task, **changes)
    return set_up(resolve_defaults(run, world), world)


@contextmanager
def _leave_new_group() -> Iterator[None]:
    """Destroy a process group that was created in this block."""
    was_initialized = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_initialized:
        dist.destroy_process_group()


def measure_set_up_memory(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> dict[str, int]:
    """Set up a run; return the largest growth of the memory of this process, in bytes.

    Also returns the bytes of all weights, and of the largest weight. Freed memory is returned to
    the system at once; by default the C library would keep some of it.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    before = _read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM)
    with _leave_new_group():
        state = _set_up(folder, data, task, changes).state
        growth = _read_memory("VmHWM") - before
        sizes = [value.numel() * 4 for value in state.model.module.parameters()]
    return {"growth": growth, "all_weights": sum(sizes), "largest_weight": max(sizes)}


def has_tied_shards(folder: str, data: str, task: str, changes: dict[str, Any]) -> bool:
    """Set up a run; return whether its head and its embeddings are one sharded weight."""
    module: Any = _set_up(folder, data, task, changes).state.model.module
    inner = module.model
    embeddings = inner.get_input_embeddings().weight
    is_tied = inner.get_output_embeddings().weight is embeddings
    return isinstance(embeddings, DTensor) and is_tied


def measure_memory(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Set up a run; return the memory of this process by part, and the plan of a dry run."""
    context, state = _set_up(folder, data, task, changes)
    optimizers.prime_state(state.optimizer)
    memory = memory_by_content(context, state)
    memory.pop("peak", None)
    run = settings(Path(folder), Path(data), task, **changes)
    tables = merge(dump(run), {"execution": {"processes": context.world.size}})
    return memory, describe_model(build(TrainSettings, tables))


def _read_memory(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    table = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(table[name].split()[0]) * 1024


def final_outputs(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Train alone; return the outputs of the final model in memory, and their tokens."""
    states: list[TrainState] = []
    save = trainer.save_checkpoint

    def record_and_save(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
        states.append(state)
        save(context, state, metrics)

    with patch.object(trainer, "save_checkpoint", record_and_save):
        attempt(settings(Path(folder), Path(data), task, **changes), processes.detect_world())
    tokens = torch.arange(5, 29).view(2, 12)
    inner: Any = states[-1].model.module.eval().model
    with torch.no_grad():
        outputs = inner(tokens.to(next(inner.parameters()).device))
    output = outputs.last_hidden_state if task == "contrastive" else outputs.logits
    return {"tokens": tokens, "output": output.cpu()}


def _hash_state(state: TrainState) -> dict[str, str]:
    """Return the hash of every tensor of a checkpoint, unsharded, and the optimizer's step."""
    hashes = {}
    for name, value in state.tensors().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        data = full.detach().cpu().contiguous().numpy().tobytes()
        hashes[name] = f"{tuple(full.shape)} {hashlib.sha256(data).hexdigest()}"
    hashes["step"] = str(state.optimizer_steps)
    return hashes


def count_graphs(folder: str, data: str, changes: dict[str, Any], odd_step: int) -> dict[str, Any]:
    """Train with compiled blocks, and an undeclared length in one step; count graphs by step.

    The number of graphs does not depend on the backend; "aot_eager" compiles fastest.
    """
    torch.compiler.reset()
    counters.clear()
    dynamo.recompile_limit = 2  # a run needs more than that, and must raise the limit
    run = settings(Path(folder), Path(data), "contrastive", **changes)
    counts: list[int] = []
    shapes: set[tuple[int, ...]] = set()
    load_batches, check_step = BatchLoader.load_batches, RecompileMonitor.check_step
    accumulate = GradientComputer.accumulate_gradients

    def load_odd_batches(self: BatchLoader, numbers: Any, *, epoch: int, step: int) -> Any:
        declared = self._bucket_lengths
        self._bucket_lengths = (declared[-1] + 8,) if step == odd_step else declared
        batches = load_batches(self, numbers, epoch=epoch, step=step)
        self._bucket_lengths = declared
        return batches

    def count_and_check(self: RecompileMonitor, step: int, batches: list[Any]) -> None:
        counts.append(run.accelerator.num_compiled_graphs() if run.accelerator else 0)
        check_step(self, step, batches)

    def record_shapes(self: GradientComputer, batches: list[Any], *rest: Any) -> torch.Tensor:
        shapes.update(tuple(batch["tokens"].shape) for batch in batches)
        return accumulate(self, batches, *rest)

    answer = {"code": 0, "problem": ""}
    with (
        warnings.catch_warnings(action="ignore"),  # the compiler warns about torch itself
        patch.object(BatchLoader, "load_batches", load_odd_batches),
        patch.object(RecompileMonitor, "check_step", count_and_check),
        patch.object(GradientComputer, "accumulate_gradients", record_shapes),
        _fast_backend(),
    ):
        try:
            attempt(run, processes.detect_world())
        except RegaugeError as error:
            answer = {"code": error.exit_code, "problem": str(error)}
    end = run.accelerator.num_compiled_graphs() if run.accelerator else 0
    planned = plan_run(run)["graphs_per_block"]
    return {**answer, "counts": [*counts, end], "shapes": sorted(shapes), "planned": planned}


@contextmanager
def _fast_backend() -> Iterator[None]:
    """Compile blocks with the backend that compiles fastest."""
    compile_module = torch.nn.Module.compile

    def compile_fast(self: torch.nn.Module, **options: Any) -> None:
        compile_module(self, **{**options, "backend": "aot_eager"})

    with patch.object(torch.nn.Module, "compile", compile_fast):
        yield


def train_undecided(
    folder: str, data: str, changes: dict[str, Any], verdict: str
) -> tuple[str, int]:
    """Train with `execution.compile` = "auto"; return the decision and the number of graphs.

    The verdict of the timing is "pays" or something else; with "over" there must be no timing.
    """
    torch.compiler.reset()
    counters.clear()
    run = settings(Path(folder), Path(data), "mlm", **changes)
    decisions: list[str] = []
    train = running.train

    def record_decision(context: Any, *rest: Any) -> Any:
        decisions.append(context.settings.execution.compile)
        return train(context, *rest)

    def judge(*_: Any) -> tuple[bool, str]:
        assert verdict != "over", "it is decided once"
        return verdict == "pays", "a test decides"

    with (
        warnings.catch_warnings(action="ignore"),
        patch.object(decision, "MIN_SECONDS_PER_GRAPH", 0.0),
        patch.object(decision, "MAX_DECISION_SHARE", math.inf),
        patch.object(decision, "is_worthwhile", judge),
        patch.object(running, "train", record_decision),
        _fast_backend(),
    ):
        attempt(run, processes.detect_world())
    return decisions[0], run.accelerator.num_compiled_graphs() if run.accelerator else 0


def train_counting_graphs(folder: str, data: str, task: str, changes: dict[str, Any]) -> int:
    """Train with compiled blocks; return the number of graphs."""
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings(action="ignore"), _fast_backend():
        train(folder, data, task, changes)
    return int(counters["stats"]["unique_graphs"])


def train_compiled(folder: str, data: str, task: str, changes: dict[str, Any]) -> Lines:
    """Train as `train` does; warnings of the compiler about torch itself are no errors."""
    torch.compiler.reset()
    with warnings.catch_warnings(action="ignore"):
        return train(folder, data, task, changes)


def dropout_compiled(vector_bits: int | None) -> bool:
    """Return whether compiled and eager dropout are bitwise equal; 1 bit compiles scalar code."""
    torch.compiler.reset()
    keys = DropoutKeys()
    keys.current = RowKeys(torch.arange(8, dtype=torch.int32) * 7919)
    dropout = CounterDropout(0.1, 2, keys)
    hidden = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0))
    with patch.object(inductor.cpp, "simdlen", vector_bits):
        output = torch.compile(dropout, dynamic=False, fullgraph=True)(hidden)
    return bool(output.equal(dropout(hidden)) and (output == 0).any())


def _barrier() -> None:
    if dist.is_initialized():
        wait_for_all()


def lines(folder: Path) -> Lines:
    """Return the lines of metrics of a run; if two attempts wrote a step, the later one counts."""
    by_step: dict[tuple[int, bool], dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if "summary" not in values:
            by_step[values["step"], "train/loss" in values] = values
    return [by_step[key] for key in sorted(by_step)]


def losses(rows: Lines) -> list[float]:
    """Return the training losses of lines of metrics, in the order of steps."""
    return [row["train/loss"] for row in rows if "train/loss" in row]


def max_difference(expected: Path, folder: Path) -> float:
    """Return the largest relative difference of the training losses of two runs."""
    pairs = zip(losses(lines(expected)), losses(lines(folder)), strict=True)
    return max(abs(a - b) / a for a, b in pairs)


def read_checksum(folder: Path) -> str:
    """Return the checksum of the initial weights of a run."""
    return str(json.loads((folder / "run.json").read_text())["run"]["weights_checksum"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    return load_file(folder / "model" / "model.safetensors")


def save_with_torch(sizes: dict[str, int], given: str, folder: str) -> None:
    """Save a BERT and its optimizer as a user of torch's FSDP and distributed checkpoint does."""
    model = BertModel(BertConfig(**sizes))
    model.load_state_dict(load_file(given))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    document = {"model": weights, "optim": moments, "step": 3}
    dcp.save(document, checkpoint_id=folder, no_dist=not dist.is_initialized())
    _barrier()
