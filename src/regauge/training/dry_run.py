"""Plans and checks a run before anything is allocated: `--dry-run`, and checks before the start.

This module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.data import tokenizer
from regauge.data.buckets import BatchForm
from regauge.data.dataset import MANIFEST
from regauge.data.unprepared import NO_ROWS, find_rows, is_prepared
from regauge.machines.catalog import find_price
from regauge.monitoring.notify.sinks import build_sinks
from regauge.supervision.nodes.topology import resolve_topology
from regauge.system import processes
from regauge.system.errors import SettingsError, find_refusal
from regauge.system.hub import local_only, resolve_model
from regauge.system.log import logger
from regauge.system.wording import format_count
from regauge.training import run_record, task_schedule, warm_start
from regauge.training.defaults import (
    check_best_direction,
    check_device,
    check_world_size,
    count_world,
    find_accelerator,
)
from regauge.training.optimizer_defaults import describe_optimizer
from regauge.training.resolve import resolve_data

if TYPE_CHECKING:
    from regauge.data.dataset import DatasetManifest
    from regauge.data.unprepared import RowsByFolder
    from regauge.training.resolve import ResolvedData
    from regauge.training.settings import TaskConfig, TrainSettings


def plan_run(settings: TrainSettings) -> dict[str, Any]:
    """Return steps, rows, batch shapes, processes and price, for `--dry-run`."""
    configs = settings.task_configs
    plan: dict[str, Any] = {
        "output": settings.output.folder,
        **_merge_by_task(configs, [_describe_config(config) for config in configs]),
        **describe_optimizer(settings),
        "processes": settings.execution.processes,
        "price": price.description
        if (price := find_price(settings.execution.price))
        else "unknown",
    }
    topology = resolve_topology(settings.execution.nodes, Path(settings.output.folder))
    if topology is not None:
        fewest, most = topology.min_nodes, topology.max_nodes
        nodes = f"{fewest} to {most}" if most > fewest else most
        plan["nodes"] = f"{nodes}, rendezvous at {topology.endpoint} ({topology.backend})"
    plan |= find_refusal(lambda: build_sinks(settings.monitoring.notifications))
    plan |= find_refusal(lambda: check_device(settings))
    datasets = [config.data.path for config in configs]
    unprepared = [dataset for dataset in datasets if not (Path(dataset) / MANIFEST).exists()]
    if unprepared:
        return {**plan, "data": f"{unprepared[0]} is not prepared yet"}
    manifests, refusal = check_run_offline(settings)
    warn_about_length(settings, manifests[0])
    is_open = any(config.batch.microbatch_rows == "auto" for config in configs)
    is_lazy = settings.accelerator is not None and settings.accelerator.is_lazy
    if is_lazy and not is_open and len(configs) == 1:
        plan["num_graphs"] = count_graphs(settings, manifests[0])
    elif settings.execution.compile == "blocks":
        pairs = zip(configs, manifests, strict=True)
        lengths = sum(len(config.task.bucket_lengths(manifest)) for config, manifest in pairs)
        plan["graphs_per_block"] = 2 * lengths
    steps_per_epoch = task_schedule.count_steps_per_epoch(settings, manifests[0])
    pairs = zip(configs, manifests, strict=True)
    if not refusal and (result := find_finished(settings, manifests)):
        plan["action"] = f"nothing: {describe_finished(settings, result)}"
    return {
        **plan,
        "steps": settings.stop.total_steps(steps_per_epoch),
        "steps_per_epoch": steps_per_epoch,
        **_merge_by_task(
            configs, [_describe_rows(settings, config, manifest) for config, manifest in pairs]
        ),
        **({} if "error" in plan else refusal),
    }


def find_finished(
    settings: TrainSettings, manifests: list[DatasetManifest]
) -> dict[str, Any] | None:
    """Return the result in the output folder if its run is finished, otherwise None."""
    steps_per_epoch = task_schedule.count_steps_per_epoch(settings, manifests[0])
    total_steps = settings.stop.total_steps(steps_per_epoch)
    return run_record.find_result(Path(settings.output.folder), settings, total_steps)


def describe_finished(settings: TrainSettings, result: dict[str, Any]) -> str:
    steps, requested = result["steps"], settings.stop.steps
    text = f"{settings.output.folder} is finished at step {steps}"
    if requested is not None and requested < steps:
        text += f", after stop.steps = {requested}"
    return f"{text}; nothing is changed"


@local_only()
def check_run_offline(settings: TrainSettings) -> tuple[list[DatasetManifest], dict[str, Any]]:
    """Check a run without network access; return the dataset manifests.

    Also returns `error` with the reason if the run cannot use the output folder. Raises the errors
    of `check_run` for all other problems. Weights missing on this machine are not checked.
    """
    data = _check_data(settings)
    refusal = find_refusal(data.find_run_id)
    if not refusal and find_count_obstacle(data.settings) is None:
        _check_weights(data.settings)
    _check_size(data.settings)
    return data.manifests, refusal


def _merge_by_task(
    configs: tuple[TaskConfig, ...], descriptions: list[dict[str, Any]]
) -> dict[str, Any]:
    """Merge task descriptions; with several tasks, keys get the prefix `<name>_`."""
    if len(configs) == 1:
        return descriptions[0]
    return {
        f"{config.name}_{key}": value
        for config, description in zip(configs, descriptions, strict=True)
        for key, value in description.items()
    }


def _describe_config(config: TaskConfig) -> dict[str, Any]:
    is_open = config.batch.microbatch_rows == "auto"
    return {
        "task": config.task.kind,
        **({"weight": config.weight} if config.name else {}),
        "global_batch_rows": config.batch.rows,
        "microbatches": "auto (batch size finder)" if is_open else config.batch.microbatches,
    }


def _describe_rows(
    settings: TrainSettings, config: TaskConfig, manifest: DatasetManifest
) -> dict[str, Any]:
    per_row = config.task.sequences_per_row(manifest)
    if config.batch.microbatch_rows == "auto":
        sequences = f"(microbatch_rows x {per_row})"
    else:
        sequences = str(config.batch.microbatch * per_row)
    return {
        "train_rows": manifest.splits["train"].rows,
        "heldout_rows": manifest.splits["heldout"].rows,
        "batch_shapes": [
            f"{sequences} x {length}" for length in config.task.bucket_lengths(manifest)
        ],
        **_describe_padding(settings, config, manifest),
    }


def _describe_padding(
    settings: TrainSettings, config: TaskConfig, manifest: DatasetManifest
) -> dict[str, float]:
    """Return the share of real tokens, and that of a compiled run if this is decided later."""
    accelerator = find_accelerator(settings)
    batch, compile_mode = config.batch, settings.execution.compile
    microbatch_rows = batch.rows if batch.microbatch_rows == "auto" else batch.microbatch

    def count(*, has_any_shape: bool) -> float:
        size = count_world(settings, accelerator).size
        form = BatchForm(batch.rows, microbatch_rows, has_any_shape, size)
        counts = config.task.sample_tokens(
            config.data, manifest, form, seed=settings.seed, total_steps=settings.stop.total_steps
        )
        return round(counts.real_fraction, 4)

    compiled = count(has_any_shape=False)
    if not accelerator.has_dynamic_shapes or compile_mode == "blocks":
        return {"real_token_fraction": compiled}
    uncompiled = count(has_any_shape=True)
    is_undecided = compile_mode == "auto" and compiled != uncompiled
    return {
        "real_token_fraction": uncompiled,
        **({"real_token_fraction_if_compiled": compiled} if is_undecided else {}),
    }


def count_graphs(settings: TrainSettings, manifest: DatasetManifest) -> int:
    """Return the number of graphs that a lazy device compiles for a new run with one task.

    - Optimizer state: one graph creates it, one finalizes it.
    - Microbatches: one graph per shape, and one more per shape if gradients accumulate.
    - A loss over the global batch: one graph per shape for the outputs, and one for the loss.
    - The update: one graph.
    - Evaluation: one graph per shape, one if metrics need all rows, one if samples are generated.
    """
    (config,) = settings.task_configs
    task, processes_per_node = config.task, settings.execution.processes
    num_shapes = len(task.bucket_lengths(manifest))
    num_processes = processes_per_node if isinstance(processes_per_node, int) else 1
    local_microbatches = -(-config.batch.microbatches // num_processes)
    graphs = 2 + min(2, local_microbatches) * num_shapes + 1
    if task.needs_global_batch:
        graphs += num_shapes + 1
    if manifest.splits["heldout"].rows > 0:
        has_samples = settings.evaluation.samples.prompts > 0 and task.generative
        graphs += num_shapes + task.metrics_need_all_rows + has_samples
    return graphs


def find_count_obstacle(settings: TrainSettings, described: RowsByFolder = NO_ROWS) -> str | None:
    """Return why the model's parameters cannot be counted yet, or None.

    `described` holds `[rows]` tables for datasets that are not prepared yet. Nothing is downloaded.
    """
    for config in settings.task_configs:
        has_fields = is_prepared(Path(config.data.path)) or has_rows_table(described, config)
        if config.task.module_needs_fields and not has_fields:
            return "its inputs are the fields of the prepared data, or of [rows]"
    model = settings.model
    if model.path is not None:
        try:
            resolve_model(model.path, fetch=False)
        except SettingsError as error:
            return error.problem
        return None
    data = Path(settings.task_configs[0].data.path)
    if not (data / MANIFEST).exists() and "vocab_size" not in model.config:
        return "its vocabulary is that of the prepared data, or model.config.vocab_size"
    return None


def has_rows_table(described: RowsByFolder, config: TaskConfig) -> bool:
    """Return whether the task's dataset has a `[rows]` table with the task's row layout."""
    rows = find_rows(described, config.data.path)
    return rows is not None and rows.layout == config.task.row_layout()


def check_run(settings: TrainSettings) -> list[DatasetManifest]:
    """Check whether a run can start; return the dataset manifests.

    Raises DataError or SettingsError for a problem with the data, the task, the weights, the output
    folder or the number of processes.
    """
    data = _check_data(settings)
    data.find_run_id()
    _check_weights(data.settings)
    _check_size(data.settings)
    return data.manifests


def _check_data(settings: TrainSettings) -> ResolvedData:
    resolved = warm_start.use_copied_weights(settings)
    if resolved is settings and settings.model.init_from is not None:
        warm_start.check_source(settings.model.init_from)
    data = resolve_data(resolved)
    _check_heldout(settings, data.manifests)
    return data


def _check_heldout(settings: TrainSettings, manifests: list[DatasetManifest]) -> None:
    """Raise SettingsError if a metric is needed without held-out rows, or lacks a direction."""
    best = settings.output.checkpoint.best_metric
    has_metric = best not in {"auto", "off"}
    needs = {
        "stop.patience": settings.stop.patience is not None,
        "output.final_model": settings.has_best_final_model,
        "output.checkpoint.best_metric": has_metric,
        "stop.target": settings.stop.target is not None,
    }
    has_rows = any(manifest.splits["heldout"].rows for manifest in manifests)
    if not has_rows and (key := next((key for key, needed in needs.items() if needed), None)):
        problem = f"{key} needs held-out rows, and {settings.data.path} has none"
        raise SettingsError(problem, f"prepare it with split.heldout_fraction, or remove {key}")
    if has_metric:
        check_best_direction(settings, best)


def _check_weights(settings: TrainSettings) -> None:
    output, path = Path(settings.output.folder), settings.model.path
    if path and settings.model.weights == "pretrained" and run_record.read_run(output) is None:
        dataset = Path(settings.task_configs[0].data.path)
        tokenizer.check_same_tokenizer(dataset, resolve_model(path))
        for config in settings.task_configs:
            config.task.check_weights(resolve_model(path))


def warn_about_length(settings: TrainSettings, manifest: DatasetManifest) -> None:
    """Warn about a batch larger than the first task's dataset, and a warm-up without end.

    `manifest` belongs to that dataset.
    """
    num_rows, batch_rows = manifest.splits["train"].rows, settings.task_configs[0].batch.rows
    if batch_rows > num_rows:
        message = "batch.rows is %d, and the dataset has %s: each step is a whole epoch"
        logger.warning(message, batch_rows, format_count(num_rows, "training row"))
    warmup_steps = settings.optimizer.schedule.warmup_steps
    total_steps = settings.stop.total_steps(task_schedule.count_steps_per_epoch(settings, manifest))
    if warmup_steps != "auto" and warmup_steps >= total_steps:
        message = "optimizer.schedule.warmup_steps is %d, and the run has %s: the learning rate"
        message += " does not reach its peak"
        logger.warning(message, warmup_steps, format_count(total_steps, "step"))


def _check_size(settings: TrainSettings) -> None:
    if not processes.is_launched() and isinstance(settings.execution.processes, int):
        local_size = settings.execution.processes
        topology = resolve_topology(settings.execution.nodes, Path(settings.output.folder))
        size = local_size * (topology.max_nodes if topology else 1)
        check_world_size(settings, processes.World(rank=1, size=size, local_size=local_size))
