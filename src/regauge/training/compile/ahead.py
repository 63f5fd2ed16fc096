"""Compiling ahead of time: a trial of every declared shape, an evaluation and a save, no training.

What a run compiles is then in its cache, and the run itself starts at once.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regauge.errors import SettingsError
from regauge.training import task_schedule, warm_start
from regauge.training.batch_finder import finder
from regauge.training.checkpointing import save_checkpoint
from regauge.training.compile.parallel import Part
from regauge.training.compile.warmup import settle_state, warm_up
from regauge.training.defaults import resolve_defaults
from regauge.training.run_setup import NO_SUPERVISOR, set_up
from regauge.training.trainer import evaluate

if TYPE_CHECKING:
    from regauge.processes import World
    from regauge.training.settings import Training

WHOLE = Part()


def compile_ahead(settings: Training, world: World, part: Part = WHOLE) -> dict[str, Any]:
    """Fill the cache of a run, and return what was found there and what was made.

    Every process of the run calls this. Raises SettingsError for a run that compiles nothing.
    """
    settings = warm_start.resolve_warm_start(settings, world, NO_SUPERVISOR)
    task_schedule.read_manifests(settings)
    settings = finder.resolve_microbatch(
        resolve_defaults(settings, world, NO_SUPERVISOR), world, NO_SUPERVISOR
    )
    accelerator = settings.accelerator
    if accelerator is None or not (accelerator.lazy or settings.execution.compile == "blocks"):
        raise SettingsError("the run compiles nothing", 'set execution.compile = "blocks"')
    joined = dist.is_initialized()
    with tempfile.TemporaryDirectory(prefix="regauge-trial-") as folder:
        output = settings.output.model_copy(update={"folder": folder})
        trial = settings.model_copy(update={"output": output})
        began = time.perf_counter()
        context, state = set_up(trial, world)
        opened = time.perf_counter()
        warm_up(context, state, part.of(context.shapes))
        settle_state(context, state)
        if part == WHOLE:
            evaluate(context, state)
        took = time.perf_counter() - opened
        save_checkpoint(context, state, {})
        context.saver.wait()
        before = context.seal_cache(took)
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()
    hits, misses = accelerator.cached()
    return {
        "cache": str(context.cache.folder) if context.cache else None,
        "graphs": accelerator.graphs_compiled(),
        "found": hits,
        "made": misses,
        "seconds": round(took, 3),
        "seconds_saved": round(max(0.0, before - took), 3),
        "seconds_to_open": round(opened - began, 3),
    }
