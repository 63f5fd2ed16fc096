"""Sets up a run on this process: device, model, tasks and optimizer.

Nothing is allocated before settings, dataset and output folder have been checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regauge.accelerators import Accelerator, Precision, claim_device, init_process_group
from regauge.data import mixture
from regauge.machines.catalog import find_price
from regauge.models import architectures, multitask
from regauge.models.init_weights import build_initial_weights
from regauge.models.precision import apply_precision, sum_gradients_in_fp32
from regauge.run_folders.cost_meter import CostMeter, read_ledger_cost
from regauge.supervision.channel import WorkerReporter
from regauge.supervision.health.preflight import run_preflight
from regauge.supervision.watchdog import PREFLIGHT
from regauge.system.errors import SettingsError
from regauge.system.hooks import Hook, Hooks, inject_nothing
from regauge.system.log import logger
from regauge.training import activation_checkpointing
from regauge.training import optimizer as optimizers
from regauge.training.checkpoint.saver import Saver
from regauge.training.compile import cache as caches
from regauge.training.compile import decision
from regauge.training.compile.cache import CacheEntry
from regauge.training.context import RunContext
from regauge.training.defaults import check_precision
from regauge.training.gradients import LossScale
from regauge.training.guards import Guard
from regauge.training.ledger import Ledger
from regauge.training.metrics import MetricsWindow, MfuMeter
from regauge.training.profile.straggler import StragglerDetector
from regauge.training.state import TrainState
from regauge.training.strategies import Placement, ShardedModel, Strategy
from regauge.training.task_runtime import (
    DeviceContext,
    TaskRuntime,
    build_module,
    build_task_runtime,
)
from regauge.training.task_schedule import TaskSchedule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from regauge.data.dataset import Dataset, DatasetManifest
    from regauge.models.init_weights import InitialWeights
    from regauge.models.modules import TextModule
    from regauge.models.multitask import MultiTaskModel
    from regauge.supervision.faults.faults import FaultInjector
    from regauge.system.processes import World
    from regauge.training.settings import Execution, TrainSettings

NO_SUPERVISOR = WorkerReporter(None, 0)


class Run(NamedTuple):
    """A run set up on this process."""

    context: RunContext
    state: TrainState


def set_up(
    settings: TrainSettings,
    world: World,
    reporter: WorkerReporter = NO_SUPERVISOR,
    *,
    dtype: torch.dtype | None = None,
    injector: FaultInjector | None = None,
) -> Run:
    """Set up a run with resolved settings; every process calls this.

    `dtype` replaces the settings' compute dtype. `injector` triggers the faults in a plan. Raises
    SettingsError if accelerator or strategy are not resolved.
    """
    accelerator, strategy, execution = settings.accelerator, settings.strategy, settings.execution
    if accelerator is None or strategy is None:
        raise SettingsError("accelerator and strategy are open", "call resolve_defaults first")
    precision = check_precision(accelerator, execution.precision)
    datasets = [mixture.open_data(task.data) for task in settings.task_configs]
    module, weights = _build_module(settings, [dataset.manifest for dataset in datasets], world)
    device = _take_device(accelerator, execution, world, reporter, injector, precision=precision)
    blocks = tuple(architectures.find_blocks(module))
    emulates_fp8 = accelerator.emulates_fp8
    remark = apply_precision(module, blocks, precision, dtype, emulates_fp8=emulates_fp8)
    if accelerator.on_host:
        sum_gradients_in_fp32(module)
    if remark and world.is_main_process:
        logger.info("%s", remark)
    dtype, lazy = module.compute_dtype, accelerator.is_lazy
    placement = Placement(world, device, dtype, blocks, lazy, weights)
    model = _shard(module, placement, strategy, execution, accelerator)
    ledger = Ledger(
        _meter(settings, world, reporter), reporter.heartbeat.beat, accelerator.compile_seconds
    )
    hooks = _hooks(ledger, injector, world, device)
    end_microbatch = _end_microbatch(accelerator, reporter)
    devices = DeviceContext(world, device, accelerator, end_microbatch, hooks.before_collective)
    tasks = _tasks(settings, datasets, model, devices)
    schedule = TaskSchedule([task.weight for task in settings.task_configs])
    flops_per_token = schedule.mean([task.flops_per_token for task in tasks])
    context = RunContext(
        settings=settings,
        world=world,
        accelerator=accelerator,
        device=device,
        tasks=tasks,
        task_schedule=schedule,
        hooks=hooks,
        ledger=ledger,
        metrics=MetricsWindow(device, world, ledger, tuple(task.name for task in tasks)),
        mfu=MfuMeter(accelerator, precision, flops_per_token, world.size),
        saver=_saver(settings, world, hooks, reporter),
        cache=_open_cache(settings, module, [task.bucket_lengths for task in tasks], world),
        reporter=reporter,
        end_microbatch=end_microbatch,
    )
    context.pack_batches()
    state = _state(context, model, weights, precision)
    if injector is not None:
        injector.attach(state.model, state.lr_schedule)
    return Run(context, state)


def _state(
    context: RunContext, model: ShardedModel, weights: InitialWeights, precision: Precision
) -> TrainState:
    settings, device, lazy = context.settings.optimizer, context.device, context.accelerator.is_lazy
    optimizer = optimizers.build_optimizer(settings, model.masters().items(), lazy=lazy)
    return TrainState(
        model=model,
        optimizer=optimizer,
        lr_schedule=optimizers.LRSchedule(settings, context.total_steps, device, lazy=lazy),
        loss_scale=LossScale(enabled=precision == "fp16"),
        guard=Guard(settings.guard, optimizer, device, lazy=lazy, tasks=len(context.tasks)),
        initial_weights=weights,
    )


def _hooks(
    ledger: Ledger, injector: FaultInjector | None, world: World, device: torch.device
) -> Hooks:
    hooks: list[Hook] = [ledger]
    if world.size > 1:
        hooks.append(StragglerDetector(world, device))
    if injector is not None:
        hooks.append(injector)
    return Hooks(hooks)


def _tasks(
    settings: TrainSettings, datasets: list[Dataset], model: ShardedModel, devices: DeviceContext
) -> tuple[TaskRuntime, ...]:
    return tuple(
        build_task_runtime(settings, config, dataset, model, devices)
        for config, dataset in zip(settings.task_configs, datasets, strict=True)
    )


def _end_microbatch(accelerator: Accelerator, reporter: WorkerReporter) -> Callable[[], None]:
    def end_microbatch() -> None:
        accelerator.end_microbatch()
        reporter.heartbeat.beat()

    return end_microbatch


def _build_module(
    settings: TrainSettings, manifests: list[DatasetManifest], world: World
) -> tuple[TextModule | MultiTaskModel, InitialWeights]:
    """Return the module on the meta device, and its initial weights.

    Raises SettingsError for rows that do not fit the model; nothing is allocated yet.
    """
    module = build_module(settings, manifests)
    pairs = zip(settings.task_configs, manifests, strict=True)
    for (task, manifest), part in zip(
        pairs, multitask.modules_by_task(module).values(), strict=True
    ):
        _check_length(part, task.task.bucket_lengths(manifest))
    optimizers.check_lr_multipliers(
        settings.optimizer, (name for name, _ in module.named_parameters())
    )
    weights = build_initial_weights(module, settings.model, settings.seed)
    for remark in weights.warnings if world.is_main_process else ():
        logger.warning("%s", remark)
    return module, weights


def _take_device(
    accelerator: Accelerator,
    execution: Execution,
    world: World,
    reporter: WorkerReporter,
    injector: FaultInjector | None,
    *,
    precision: Precision,
) -> torch.device:
    """Take this process's device and join the others; check both if the supervisor asks for it."""
    device = claim_device(accelerator, world.device_index, execution.threads or 1)
    if execution.compile == "blocks":
        accelerator.warm_up_compiler()
    accelerator.set_precision(precision)
    init_process_group(accelerator, world, execution.timeout_seconds)
    if reporter.spec and reporter.spec.needs_preflight:
        with reporter.phase(PREFLIGHT):
            checked = "bf16" if precision == "fp8" else precision
            inject = injector.inject if injector else inject_nothing
            run_preflight(accelerator, device, checked, world, inject)
    return device


def _meter(settings: TrainSettings, world: World, reporter: WorkerReporter) -> CostMeter:
    """Return the supervisor's dollar meter, or one that continues the last ledger line."""
    if reporter.spec:
        return reporter.spec.meter
    paid = read_ledger_cost(Path(settings.output.folder))
    machines = -(-world.size // world.local_size)
    price = find_price(settings.execution.price)
    usd = price.usd_per_hour if price else None
    return CostMeter(paid, reporter.start_clock, machines, world.size, usd)


def _saver(settings: TrainSettings, world: World, hooks: Hooks, reporter: WorkerReporter) -> Saver:
    def at_point(point: str, *, step: int) -> None:
        hooks.during_save(point, step=step)
        if point == "rename":
            reporter.check_owner()

    output, beat, on_saved = settings.output, reporter.heartbeat.beat, hooks.after_save
    root = output.checkpoint_folder
    return Saver(root, output.checkpoint, world, at_point, beat, on_saved=on_saved)


def _shard(
    module: TextModule | MultiTaskModel,
    placement: Placement,
    strategy: Strategy,
    execution: Execution,
    accelerator: Accelerator,
) -> ShardedModel:
    activation_checkpointing.apply_checkpointing(
        placement.blocks, execution.activation_checkpointing, module.dropout_keys
    )
    model = strategy.prepare(module, placement)
    accelerator.retain_freed_memory()
    if execution.activation_checkpointing != "none":
        model.needs_recompute = True
    if execution.compile == "blocks":
        decision.compile_parts(module, accelerator)
    return model


def _open_cache(
    settings: TrainSettings, module: nn.Module, bucket_lengths: list[tuple[int, ...]], world: World
) -> CacheEntry | None:
    """Open the run's compile cache entry, which the accelerator uses from now on."""
    root, accelerator = caches.find_root(settings), settings.accelerator
    if root is None or accelerator is None:
        return None
    facts = caches.describe_graphs(settings, module, bucket_lengths, world)
    entry = caches.open_entry(root, facts, world)
    accelerator.set_graph_cache(entry.graphs_folder)
    return entry


def _check_length(module: TextModule, bucket_lengths: tuple[int, ...]) -> None:
    limit = module.max_tokens
    if limit is not None and bucket_lengths[-1] > limit:
        raise SettingsError(
            f"rows of {bucket_lengths[-1]} tokens do not fit the model's {limit} positions",
            "prepare shorter rows, or raise model.config.max_position_embeddings",
        )
