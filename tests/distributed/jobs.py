"""What the processes of a shared world are asked to do; every function is called on all ranks.

In the test's own process they are the run of one process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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

from distributed.runs import settings
from regauge import processes
from regauge.checkpoint.loading import load
from regauge.config import build, dump, merge
from regauge.data.loader import Feed
from regauge.errors import RegaugeError
from regauge.models.dropout import CounterDropout, DropoutKeys
from regauge.training import optimizer as optimizers
from regauge.training import run as running
from regauge.training import trainer
from regauge.training.batch_finder.memory import sized
from regauge.training.compile import decision
from regauge.training.compile.warmup import GraphGuard
from regauge.training.context import RunContext
from regauge.training.defaults import resolve_defaults
from regauge.training.dry_run import plan
from regauge.training.gradients import GradientComputer
from regauge.training.metrics import memory_by_part
from regauge.training.run import attempt
from regauge.training.run_setup import set_up
from regauge.training.settings import Training
from regauge.training.state import TrainState

M_MMAP_THRESHOLD = -3
"""Of malloc.h: what is larger is given back when it is freed."""
Lines = list[dict[str, float]]
Step = tuple[int, list[list[tuple[int, int]]]]
"""The number of a step, and (row, part) of every text in every microbatch of one process."""


def train(folder: str, data: str, task: str, changes: dict[str, Any]) -> Lines:
    """Train a tiny model in this world; return the lines of metrics that the run wrote."""
    attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    _meet()
    return lines(Path(folder))


def stopped(folder: str, data: str, task: str, changes: dict[str, Any]) -> tuple[int, str]:
    """Train to a limit; return the exit code and the message of the error that says so."""
    try:
        attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    except RegaugeError as error:
        return error.exit_code, str(error)
    return 0, ""


def watched(folder: str, data: str, task: str, changes: dict[str, Any]) -> list[Step]:
    """Train; return the rows that this process really computed, by step."""
    run = settings(Path(folder), Path(data), task, **changes)
    with _watching(run) as seen:
        attempt(run, processes.world())
    _meet()
    return seen


@contextmanager
def _watching(run: Training) -> Iterator[list[Step]]:
    kind, seen = type(run.task), []
    built, computed = kind.batch, GradientComputer.accumulate_gradients

    def batch(self: Any, rows: Any, piece: Any, draw: Any, facts: Any) -> dict[str, np.ndarray]:
        named = {"rows": piece.rows, "parts": piece.parts, "step": np.array([draw.step])}
        return {**built(self, rows, piece, draw, facts), **named}

    def accumulate_gradients(
        self: GradientComputer, batches: list[Any], *rest: Any
    ) -> torch.Tensor:
        texts = [list(zip(b["rows"].tolist(), b["parts"].tolist(), strict=True)) for b in batches]
        seen.append((int(batches[0]["step"]), texts))
        return computed(self, batches, *rest)

    with (
        patch.object(kind, "batch", batch),
        patch.object(GradientComputer, "accumulate_gradients", accumulate_gradients),
    ):
        yield seen


def saved_hashes(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> dict[int, dict[str, str]]:
    """Train; return the hash of every whole tensor in memory, at each step that was saved."""
    found: dict[int, dict[str, str]] = {}
    save = trainer.save_checkpoint

    def hashed(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
        found[state.step] = _hashes(state)
        save(context, state, metrics)

    with patch.object(trainer, "save_checkpoint", hashed):
        attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    return found


def loaded_hashes(
    folder: str, data: str, task: str, changes: dict[str, Any], checkpoints: list[str]
) -> list[dict[str, str]]:
    """Load checkpoints one after the other into one run; return the hashes after each."""
    world, joined = processes.world(), dist.is_initialized()
    run = resolve_defaults(settings(Path(folder), Path(data), task, **changes), world)
    opened_run = set_up(run, world)
    optimizers.prime_state(opened_run.state.optimizer)
    found = []
    for checkpoint in checkpoints:
        state = load(Path(checkpoint), opened_run.state.tensors())
        count = state["optimizer_step"]
        optimizers.set_steps_taken(
            opened_run.state.optimizer, opened_run.state.model.masters(), count
        )
        found.append(_hashes(opened_run.state))
    if dist.is_initialized() and not joined:
        dist.destroy_process_group()
    return found


def opened(folder: str, data: str, task: str, changes: dict[str, Any]) -> dict[str, int]:
    """Set up a run; return the most bytes by which memory grew on the way.

    Beside them stand the bytes of all weights, and of the largest one. The C library gives what is
    freed back to the system, where it would keep some of it for later.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    world, joined = processes.world(), dist.is_initialized()
    run = resolve_defaults(settings(Path(folder), Path(data), task, **changes), world)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the largest of what came before
    opened_run = set_up(run, world)
    most = _memory("VmHWM") - before
    sizes = [value.numel() * 4 for value in opened_run.state.model.module.parameters()]
    if dist.is_initialized() and not joined:
        dist.destroy_process_group()
    return {"most": most, "whole": sum(sizes), "largest": max(sizes)}


def tied(folder: str, data: str, task: str, changes: dict[str, Any]) -> bool:
    """Set up a run; return whether its head and its embeddings are one sharded weight."""
    run = resolve_defaults(settings(Path(folder), Path(data), task, **changes), processes.world())
    module: Any = set_up(run, processes.world()).state.model.module
    inner = module.model
    words = inner.get_input_embeddings().weight
    return isinstance(words, DTensor) and inner.get_output_embeddings().weight is words


def holding(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Set up a run; return what this process holds, and what a dry run says of it."""
    run = settings(Path(folder), Path(data), task, **changes)
    opened_run = set_up(resolve_defaults(run, processes.world()), processes.world())
    optimizers.prime_state(opened_run.state.optimizer)
    found = memory_by_part(*opened_run)
    found.pop("peak", None)
    size = merge(dump(run), {"execution": {"processes": processes.world().size}})
    return found, sized(build(Training, size))


def _memory(name: str) -> int:
    """Return a line of this process's memory, in bytes."""
    table = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(table[name].split()[0]) * 1024


def final_outputs(
    folder: str, data: str, task: str, changes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Train alone; return the outputs of the model in memory at the end, and their tokens."""
    kept: list[TrainState] = []
    save = trainer.save_checkpoint

    def keeping(context: RunContext, state: TrainState, metrics: dict[str, float]) -> None:
        kept.append(state)
        save(context, state, metrics)

    with patch.object(trainer, "save_checkpoint", keeping):
        attempt(settings(Path(folder), Path(data), task, **changes), processes.world())
    tokens = torch.arange(5, 29).view(2, 12)
    inner: Any = kept[-1].model.module.eval().model
    with torch.no_grad():
        output = inner(tokens)
    whole = output.last_hidden_state if task == "contrastive" else output.logits
    return {"tokens": tokens, "output": whole}


def _hashes(state: TrainState) -> dict[str, str]:
    """Return the hash of every tensor that this process holds, whole, and the optimizer's step."""
    found = {}
    for name, value in state.tensors().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        data = whole.detach().cpu().contiguous().numpy().tobytes()
        found[name] = f"{tuple(whole.shape)} {hashlib.sha256(data).hexdigest()}"
    found["step"] = str(state.optimizer_steps)
    return found


def compiled(folder: str, data: str, changes: dict[str, Any], odd_step: int) -> dict[str, Any]:
    """Train with compiled graphs, and an undeclared length in one step; tell what was made when.

    Graphs are the same whichever backend computes them, and "aot_eager" is the fastest to make.
    """
    torch.compiler.reset()
    counters.clear()
    dynamo.recompile_limit = 2  # a run needs more than that, and has to make the room itself
    run = settings(Path(folder), Path(data), "contrastive", **changes)
    counts: list[int] = []
    shapes: set[tuple[int, ...]] = set()
    batches, check, computed = (
        Feed.batches,
        GraphGuard.check_step,
        GradientComputer.accumulate_gradients,
    )

    def odd(self: Feed, numbers: Any, *, epoch: int, step: int) -> Any:
        declared = self._ladder
        self._ladder = (declared[-1] + 8,) if step == odd_step else declared
        made = batches(self, numbers, epoch=epoch, step=step)
        self._ladder = declared
        return made

    def counted(self: GraphGuard, step: int, batch: list[Any]) -> None:
        counts.append(run.accelerator.graphs_compiled() if run.accelerator else 0)
        check(self, step, batch)

    def accumulate_gradients(self: GradientComputer, given: list[Any], *rest: Any) -> torch.Tensor:
        shapes.update(tuple(batch["tokens"].shape) for batch in given)
        return computed(self, given, *rest)

    answer = {"code": 0, "problem": ""}
    with (
        warnings.catch_warnings(action="ignore"),  # the compiler's own, about torch itself
        patch.object(Feed, "batches", odd),
        patch.object(GraphGuard, "check_step", counted),
        patch.object(GradientComputer, "accumulate_gradients", accumulate_gradients),
        _quick_graphs(),
    ):
        try:
            attempt(run, processes.world())
        except RegaugeError as error:
            answer = {"code": error.exit_code, "problem": str(error)}
    end = run.accelerator.graphs_compiled() if run.accelerator else 0
    planned = plan(run)["graphs_per_block"]
    return {**answer, "counts": [*counts, end], "shapes": sorted(shapes), "planned": planned}


@contextmanager
def _quick_graphs() -> Iterator[None]:
    """Have blocks compiled by the backend that is the fastest to make a graph."""
    compile_module = torch.nn.Module.compile

    def chosen(self: torch.nn.Module, **named: Any) -> None:
        compile_module(self, **{**named, "backend": "aot_eager"})

    with patch.object(torch.nn.Module, "compile", chosen):
        yield


def train_undecided(folder: str, data: str, changes: dict[str, Any], trial: str) -> tuple[str, int]:
    """Train where it is left open whether blocks are compiled; return what was decided, and graphs.

    The trial says that it "pays" or not; there must be none where it is "over".
    """
    torch.compiler.reset()
    counters.clear()
    run = settings(Path(folder), Path(data), "mlm", **changes)
    decided: list[str] = []
    train = running.train

    def seen(context: Any, *rest: Any) -> Any:
        decided.append(context.settings.execution.compile)
        return train(context, *rest)

    def said(*_: Any) -> tuple[bool, str]:
        assert trial != "over", "it is decided once"
        return trial == "pays", "it is said so"

    with (
        warnings.catch_warnings(action="ignore"),
        patch.object(decision, "SHORT_SECONDS", 0.0),
        patch.object(decision, "is_worthwhile", said),
        patch.object(running, "train", seen),
        _quick_graphs(),
    ):
        attempt(run, processes.world())
    return decided[0], run.accelerator.graphs_compiled() if run.accelerator else 0


def train_graphed(folder: str, data: str, task: str, changes: dict[str, Any]) -> int:
    """Train with blocks compiled; return how many graphs there were."""
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings(action="ignore"), _quick_graphs():
        train(folder, data, task, changes)
    return int(counters["stats"]["unique_graphs"])


def train_compiled(folder: str, data: str, task: str, changes: dict[str, Any]) -> Lines:
    """Train as `train` does; what the compiler warns of, about torch itself, is no error."""
    torch.compiler.reset()
    with warnings.catch_warnings(action="ignore"):
        return train(folder, data, task, changes)


def dropout_compiled(vector_bits: int | None) -> bool:
    """Return whether compiled and eager dropout have the same bits; 1 compiles scalar code."""
    torch.compiler.reset()
    holder = DropoutKeys()
    holder.rows = torch.arange(8, dtype=torch.int32) * 7919
    part = CounterDropout(0.1, 2, holder)
    hidden = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0))
    with patch.object(inductor.cpp, "simdlen", vector_bits):
        found = torch.compile(part, dynamic=False, fullgraph=True)(hidden)
    return bool(found.equal(part(hidden)) and (found == 0).any())


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def lines(folder: Path) -> Lines:
    """Return the metrics of a run; of a step that two attempts wrote, the later one counts."""
    found: dict[tuple[int, bool], dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if "summary" not in values:
            found[values["step"], "train/loss" in values] = values
    return [found[key] for key in sorted(found)]


def losses(rows: Lines) -> list[float]:
    """Return the training losses of lines of metrics, in the order of steps."""
    return [row["train/loss"] for row in rows if "train/loss" in row]


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
    _meet()
