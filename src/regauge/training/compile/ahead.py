"""Ahead-of-time compilation: every declared shape, one evaluation and one save, without training.

The run then finds its graphs in the cache, and starts without compiling.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regauge.system.errors import SettingsError
from regauge.training import task_schedule, warm_start
from regauge.training.batch_finder import finder
from regauge.training.checkpointing import save_checkpoint
from regauge.training.compile.parallel import ShapeSubset
from regauge.training.compile.warmup import finalize_state, warm_up
from regauge.training.defaults import resolve_defaults
from regauge.training.run_setup import NO_SUPERVISOR, set_up
from regauge.training.trainer import evaluate

if TYPE_CHECKING:
    from regauge.system.processes import World
    from regauge.training.settings import TrainSettings

ALL_SHAPES = ShapeSubset()


def compile_ahead(
    settings: TrainSettings, world: World, subset: ShapeSubset = ALL_SHAPES
) -> dict[str, Any]:
    """Compile a run's graphs into its cache; return the numbers of cache hits and misses.

    Every process calls this. Raises SettingsError for a run that compiles nothing.
    """
    settings = warm_start.resolve_warm_start(settings, world, NO_SUPERVISOR)
    settings = task_schedule.resolve_tasks(settings, task_schedule.read_manifests(settings))
    settings = finder.resolve_microbatch(
        resolve_defaults(settings, world, NO_SUPERVISOR), world, NO_SUPERVISOR
    )
    accelerator = settings.accelerator
    if accelerator is None or not (accelerator.is_lazy or settings.execution.compile == "blocks"):
        raise SettingsError("the run compiles nothing", 'set execution.compile = "blocks"')
    was_initialized = dist.is_initialized()
    with tempfile.TemporaryDirectory(prefix="regauge-trial-") as folder:
        output = settings.output.model_copy(update={"folder": folder})
        began = time.perf_counter()
        context, state = set_up(settings.model_copy(update={"output": output}), world)
        set_up_end = time.perf_counter()
        warm_up(context, state, subset.select(context.shapes))
        finalize_state(context, state)
        if subset == ALL_SHAPES:
            evaluate(context, state)
        compile_seconds = time.perf_counter() - set_up_end
        save_checkpoint(context, state, {})
        context.saver.wait()
        first_seconds = context.seal_cache(compile_seconds)
        if dist.is_initialized() and not was_initialized:
            dist.destroy_process_group()
    hits, misses = accelerator.graph_cache_counts()
    return {
        "cache": str(context.cache.folder) if context.cache else None,
        "num_graphs": accelerator.num_compiled_graphs(),
        "cache_hits": hits,
        "cache_misses": misses,
        "compile_seconds": round(compile_seconds, 3),
        "saved_seconds": round(max(0.0, first_seconds - compile_seconds), 3),
        "setup_seconds": round(set_up_end - began, 3),
    }
