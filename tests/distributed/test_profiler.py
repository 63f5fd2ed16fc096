"""Profiled steps: the run is unchanged, and the profile accounts for all of their time."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.jobs import lines, losses
from distributed.runs import Runs, cases, settings
from regauge.config.output_files import PROFILE
from regauge.evaluation.report.profile_section import build_profile_section
from regauge.run_folders import run_folder as folders
from regauge.system import processes
from regauge.training.context import RunContext
from regauge.training.defaults import resolve_defaults
from regauge.training.profile import profiler
from regauge.training.profile.trace import GRADIENT_SUMS, LOSS, OPTIMIZER, STEP
from regauge.training.run_setup import set_up

STEPS = profiler.PROFILED_STEPS
BLOCKS = "model.bert.encoder.layer.*"
LAYERS, LENGTH, WIDTH, WIDE = 2, 32, 32, 64
SLOTS = 8 * LENGTH
SLOW_SECONDS = 1.0
AT_ONCE = {"data": {"workers": 0, "prefetch_steps": 1}}


def read_profile(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / PROFILE).read_text())
    return document


@pytest.mark.parametrize(
    ("size", "strategy"), cases([(1, "single"), (2, "ddp"), (2, "fsdp")], [(1, "single")])
)
def test_a_profile_changes_no_loss_and_accounts_for_the_whole_step(
    runs: Runs, size: int, strategy: str, figure: Callable[[str, float], None]
) -> None:
    plain = runs.train_once(size, "mlm", strategy=strategy)
    folder = runs.train_once(size, "mlm", strategy=strategy, profile=True)
    assert losses(lines(folder)) == losses(lines(plain))
    document = read_profile(folder)
    assert document["steps"] == [profiler.SKIPPED_STEPS + 1, profiler.SKIPPED_STEPS + STEPS]
    kinds = document["by_kind"]
    assert sum(kinds.values()) == pytest.approx(document["seconds_per_step"], rel=1e-6)
    assert all(seconds >= 0 for seconds in kinds.values())
    assert kinds["matmul"] > 0
    assert kinds["optimizer"] > 0
    parts = {part["name"]: part for part in document["by_module"]}
    computed = sum(kinds[name] for name in ("matmul", "other", "optimizer"))
    assert sum(part["seconds"] for part in parts.values()) == pytest.approx(computed, rel=1e-6)
    assert {OPTIMIZER, LOSS, "gradient norm"} <= parts.keys()
    blocks = [part for name, part in parts.items() if name.startswith(f"{BLOCKS}.")]
    assert blocks
    assert all(part["forward_seconds"] > 0 for part in blocks)
    assert all(part["backward_seconds"] > 0 for part in blocks)
    communication = kinds["communication"] + document["overlapped_communication"]
    assert (communication > 0) == (size > 1)
    figure("share of profiled steps that is Python", kinds["host"] / document["seconds_per_step"])


def test_matmul_flops_of_a_layer_follow_from_its_shapes(runs: Runs) -> None:
    """FLOPs per slot: forward 2 h w in each wide layer, backward twice that."""
    folder = runs.train_once(1, "mlm", strategy="single", profile=True)
    parts = {part["name"]: part for part in folders.read_run_folder(folder).profile["by_module"]}
    trace = json.loads(gzip.decompress((folder / profiler.TRACE).read_bytes()))
    assert sum(event["name"] == STEP for event in trace["traceEvents"]) == STEPS
    assert parts[f"{BLOCKS}.intermediate"]["flops"] == LAYERS * 3 * 2 * SLOTS * WIDTH * WIDE
    attention = 3 * (4 * 2 * SLOTS * WIDTH**2 + 2 * 2 * SLOTS * LENGTH * WIDTH)
    assert parts[f"{BLOCKS}.attention"]["flops"] == LAYERS * attention


def test_a_profile_is_a_section_of_the_report(runs: Runs) -> None:
    folder = runs.train_once(1, "mlm", strategy="single", profile=True)
    section = build_profile_section(read_profile(folder))
    assert section is not None
    assert sum(row.fraction for row in section.work_rows) == pytest.approx(1.0)
    assert sum(row.seconds for row in section.module_rows) == pytest.approx(
        sum(part["seconds"] for part in read_profile(folder)["by_module"])
    )
    first, last = profiler.SKIPPED_STEPS + 1, profiler.SKIPPED_STEPS + STEPS
    watched = f"Steps {first} to {last} of rank 0"
    assert watched in section.sentence
    assert section.advice, "a tiny model computes less than Python does"
    assert 'execution.compile = "blocks"' in " ".join(section.advice)


@pytest.mark.full
def test_a_run_shorter_than_the_skipped_steps_is_profiled(runs: Runs) -> None:
    folder = runs.train_once(1, "mlm", strategy="single", profile=True, stop={"steps": 2})
    assert read_profile(folder)["steps"] == [2, 2]
    one = runs.train_once(1, "mlm", strategy="single", profile=True, stop={"steps": 1})
    assert read_profile(one)["steps"] == [1, 1]
    assert GRADIENT_SUMS in {part["name"] for part in read_profile(one)["by_module"]}


@pytest.mark.full
def test_waiting_for_the_first_batch_counts(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = RunContext.read_batches

    def slow(self: RunContext, step: int) -> Any:
        time.sleep(SLOW_SECONDS if step == profiler.SKIPPED_STEPS else 0.0)
        return computed(self, step)

    monkeypatch.setattr(RunContext, "read_batches", slow)
    folder = runs.folder("slow")
    runs.job("train", 1, folder, "mlm", {"strategy": "single", "profile": True, **AT_ONCE})
    document = read_profile(folder)
    # Batches are built during the previous step.
    assert document["by_kind"]["data"] * STEPS >= SLOW_SECONDS / 2


def test_a_run_that_ends_while_profiled_writes_no_profile(runs: Runs) -> None:
    """It reaches its target in a profiled step."""
    reached = {"target": {"metric": "heldout/loss", "at_most": 100.0}}
    changes = {"stop": reached, "evaluation": {"every_steps": profiler.SKIPPED_STEPS + 1}}
    folder = runs.train_once(1, "mlm", strategy="single", profile=True, **changes)
    assert not (folder / PROFILE).exists()
    assert not torch._C._autograd._profiler_enabled()


def test_modules_in_compiled_blocks_are_not_annotated(runs: Runs) -> None:
    world = processes.World()
    paths = runs.folder("marked"), runs.data["packed"]
    run = set_up(resolve_defaults(settings(*paths, strategy="single"), world), world)
    module = run.state.model.module
    layers = {name: part for name, part in module.named_modules() if "layer." in name}
    first, second = (layers[f"model.bert.encoder.layer.{number}"] for number in (0, 1))
    first.compile(backend="eager")
    called = first._compiled_call_impl
    with profiler.annotate_modules(run.state.model):
        assert first._compiled_call_impl is not called
        assert not [part for part in first.modules() if part._forward_pre_hooks]
        assert [part for part in second.children() if part._forward_pre_hooks]
    assert first._compiled_call_impl is called
    assert not [part for part in module.modules() if part._forward_pre_hooks]


def test_without_the_option_there_is_no_profile(runs: Runs) -> None:
    folder = runs.train_once(1, "mlm", strategy="single")
    assert not (folder / PROFILE).exists()
    assert not (folder / profiler.TRACE).exists()
    assert build_profile_section(folders.read_run_folder(folder).profile) is None
