"""A session put together: what a run needs, placed on this process.

Nothing is allocated before the settings, the dataset and the output folder have been checked.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regauge import jsonl
from regauge.accelerators import Accelerator, Precision, join, take
from regauge.checkpoint.saver import Saver
from regauge.data import mixture
from regauge.errors import SettingsError
from regauge.faults import RECORD, Chaos
from regauge.health.preflight import preflight
from regauge.log import logger
from regauge.models import architectures as models
from regauge.models import multitask
from regauge.models.init_weights import first_weights
from regauge.models.tensors import dtype_of
from regauge.planning.catalog import rate
from regauge.strategies import Prepared, Site, Strategy
from regauge.supervision.channel import Report
from regauge.supervision.cost_meter import Meter, reading
from regauge.supervision.watchdog import PREFLIGHT
from regauge.training import activation_checkpointing
from regauge.training import optimizer as optimizers
from regauge.training.compile import cache as caches
from regauge.training.compile import decision
from regauge.training.compile.cache import Entry
from regauge.training.defaults import offered
from regauge.training.gradients import LossScale
from regauge.training.guards import Guard
from regauge.training.ledger import Ledger
from regauge.training.metrics import Interval, Pace
from regauge.training.objectives import Place, Turns, made, objective
from regauge.training.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from regauge.data.dataset import Manifest
    from regauge.models.init_weights import FirstWeights
    from regauge.models.modules import TextModule
    from regauge.models.multitask import Several
    from regauge.processes import World
    from regauge.training.settings import Execution, Training

UNHEARD = Report(None, 0)
"""Of a process without a supervisor."""


def open_session(
    settings: Training,
    world: World,
    report: Report = UNHEARD,
    dtype: torch.dtype | None = None,
) -> Session:
    """Return an assembled session of decided settings; `report` hears signs of life.

    `dtype` computes in another type than theirs.
    """
    accelerator, strategy, execution = settings.accelerator, settings.strategy, settings.execution
    if accelerator is None or strategy is None:
        raise SettingsError("nothing was decided", "call decisions.decide first")
    precision = offered(accelerator, execution.precision)
    datasets = [mixture.opened(aim.data) for aim in settings.aims]
    module, weights = _made(settings, [each.manifest for each in datasets], world)
    chaos = _chaos(settings, world, report)
    device = _device(accelerator, execution, world, report, chaos, precision=precision)
    module.compute_dtype = dtype or dtype_of(precision)
    blocks = tuple(models.blocks(module))
    site = Site(world, device, module.compute_dtype, blocks, accelerator.lazy, weights)
    prepared = _prepared(module, site, strategy, execution, accelerator)
    optimizer = optimizers.build(
        settings.optimizer, prepared.masters().items(), lazy=accelerator.lazy
    )
    pace, mark = Pace(world, device), _marking(accelerator, report)
    place = Place(world, device, accelerator, mark, pace.arrive)
    objectives = tuple(
        objective(settings, aim, dataset, prepared, place)
        for aim, dataset in zip(settings.aims, datasets, strict=True)
    )
    turns = Turns([aim.weight for aim in settings.aims])
    ledger = Ledger(_meter(settings, world, report), report.pulse.beat)
    epoch = turns.steps_per_epoch(objectives[0].order.steps_per_epoch)
    total, names = settings.stop.total_steps(epoch), tuple(each.name for each in objectives)
    return Session(
        settings=settings,
        world=world,
        accelerator=accelerator,
        device=device,
        chip=accelerator.chip(precision),
        objectives=objectives,
        turns=turns,
        prepared=prepared,
        optimizer=optimizer,
        mark=mark,
        cache=_cache(settings, module, [each.ladder for each in objectives], world),
        saver=_saver(settings, world, chaos, report),
        ledger=ledger,
        report=report,
        chaos=chaos,
        guard=Guard(
            settings.optimizer.guard, optimizer, device, lazy=accelerator.lazy, tasks=len(names)
        ),
        scale=LossScale(scaled=precision == "fp16"),
        rates=optimizers.Rates(settings.optimizer, total, device, lazy=accelerator.lazy),
        interval=Interval(device, ledger, names),
        pace=pace,
        first=weights,
    )


def _marking(accelerator: Accelerator, report: Report) -> Callable[[], None]:
    """Return what ends a microbatch for the device, and gives a sign of life."""

    def mark() -> None:
        accelerator.end_microbatch()
        report.pulse.beat()

    return mark


def _made(
    settings: Training, manifests: list[Manifest], world: World
) -> tuple[TextModule | Several, FirstWeights]:
    """Return the module on the meta device, and the weights that a strategy gives it.

    What does not fit is refused here, where nothing is allocated yet.
    """
    module = made(settings, manifests)
    pairs = zip(settings.aims, manifests, strict=True)
    for (aim, manifest), part in zip(pairs, multitask.parts(module).values(), strict=True):
        _check_length(part, aim.task.ladder(manifest))
    optimizers.check_shares(settings.optimizer, (name for name, _ in module.named_parameters()))
    weights = first_weights(module, settings.model, settings.seed)
    for remark in weights.remarks if world.first else ():
        logger.warning("%s", remark)
    return module, weights


def _device(
    accelerator: Accelerator,
    execution: Execution,
    world: World,
    report: Report,
    chaos: Chaos,
    *,
    precision: Precision,
) -> torch.device:
    """Take this process's device and meet the others; both are checked where that is ordered."""
    device = take(accelerator, world.device, execution.threads or 1)
    if execution.compile == "blocks":
        accelerator.expect_compiling()
    accelerator.use(precision)
    join(accelerator, world, execution.timeout_seconds)
    if report.orders and report.orders.preflight:
        with report.phase(PREFLIGHT):
            preflight(accelerator, device, precision, world, chaos)
    return device


def _chaos(settings: Training, world: World, report: Report) -> Chaos:
    orders = report.orders
    record = Path(settings.output.folder) / RECORD
    if orders is None:
        return Chaos(None, record, world.rank, 1)
    return Chaos.of(orders.chaos, record, world.rank, orders.attempt)


def _meter(settings: Training, world: World, report: Report) -> Meter:
    """Return what counts the run's dollars: the supervisor's meter, or one from its last line."""
    if report.orders:
        return report.orders.meter
    known = jsonl.last(Path(settings.output.folder) / "ledger.jsonl") or {}
    machines = -(-world.size // world.local_size)
    found = rate(settings.execution.price)
    usd = found.usd_per_hour if found else None
    return Meter(reading(known), report.began, machines, world.size, usd)


def _saver(settings: Training, world: World, chaos: Chaos, report: Report) -> Saver:
    root = Path(settings.output.folder) / "checkpoints"
    moment = partial(_at_save, chaos, report)
    return Saver(root, settings.output.checkpoint, world, moment, report.pulse.beat)


def _at_save(chaos: Chaos, report: Report, moment: str, *, step: int) -> None:
    chaos.strike(f"save:{moment}", step)
    if moment == "rename":
        report.check_owner()


def _prepared(
    module: TextModule | Several,
    site: Site,
    strategy: Strategy,
    execution: Execution,
    accelerator: Accelerator,
) -> Prepared:
    """Return the module on its processes, with its blocks recomputed and compiled as is asked."""
    activation_checkpointing.install(
        site.blocks, execution.activation_checkpointing, module.dropout_keys
    )
    prepared = strategy.prepare(module, site)
    accelerator.keep_memory()
    if execution.activation_checkpointing != "none":
        prepared.recomputes = True
    if execution.compile == "blocks":
        decision.install(module, accelerator)
    return prepared


def _cache(
    settings: Training, module: nn.Module, ladders: list[tuple[int, ...]], world: World
) -> Entry | None:
    """Return the graphs that are kept for the run, in use from now on."""
    root, accelerator = settings.execution.compile_cache, settings.accelerator
    if root is None or accelerator is None:
        return None
    found = caches.facts(settings, module, ladders, world)
    entry = caches.open_entry(Path(root).resolve(), found, world)
    accelerator.use_cache(entry.graphs)
    return entry


def _check_length(module: TextModule, ladder: tuple[int, ...]) -> None:
    limit = module.longest
    if limit is not None and ladder[-1] > limit:
        raise SettingsError(
            f"rows of {ladder[-1]} tokens do not fit the model's {limit} positions",
            "prepare shorter rows, or raise model.config.max_position_embeddings",
        )
