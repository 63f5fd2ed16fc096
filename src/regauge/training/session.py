"""One attempt of a run, assembled: everything the loop drives, placed on this process.

Nothing is allocated before the settings, the dataset and the output folder have been checked.
"""

from __future__ import annotations

import datetime as dt
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regauge.accelerators import Accelerator, Chip, settle_precision, take
from regauge.checkpoint.saver import Saver, load, newest
from regauge.data.loader import Facts, Feed, Share
from regauge.data.order import Order
from regauge.data.shards import Dataset
from regauge.errors import SettingsError
from regauge.models import build as models
from regauge.strategies import Prepared, Site, Strategy
from regauge.training import cache as caches
from regauge.training import optimizer as optimizers
from regauge.training import recompute
from regauge.training.cache import Entry
from regauge.training.ledger import Ledger, last_line
from regauge.training.progress import Interval
from regauge.training.scaling import LossScale
from regauge.training.step import Gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.shards import Manifest
    from regauge.models.text import TextModule
    from regauge.processes import World
    from regauge.tasks import Task
    from regauge.training.settings import Execution, Training

COMPUTE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}


@dataclass
class Session:
    """What one process of one attempt holds."""

    settings: Training
    world: World
    accelerator: Accelerator
    device: torch.device
    chip: Chip
    manifest: Manifest
    ladder: tuple[int, ...]
    prepared: Prepared
    optimizer: torch.optim.Optimizer
    gradients: Gradients
    order: Order
    feed: Feed
    heldout: Feed
    saver: Saver
    cache: Entry | None
    ledger: Ledger
    scale: LossScale
    rates: optimizers.Rates
    interval: Interval
    flops_per_token: float
    step: int = 0
    """Steps that are done."""
    attempt: int = 1
    resumed_step: int = 0
    before: dict[str, float] = field(default_factory=dict)
    """The held-out metrics before the first step."""

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.settings.output.folder)

    def values(self) -> dict[str, torch.Tensor]:
        """Return every tensor of a checkpoint that this process holds, by its saved name."""
        masters = self.prepared.masters()
        moments = optimizers.tensors(self.optimizer, masters)
        return {
            **{f"model.{name}": value.detach() for name, value in masters.items()},
            **{f"optimizer.{name}": value for name, value in moments.items()},
        }

    def state(self) -> dict[str, Any]:
        """Return the rest of a checkpoint: JSON-ready, and equal for equal runs."""
        return {
            "step": self.step,
            "seed": self.settings.seed,
            "data_identity": self.manifest.identity,
            "attempt": self.attempt,
            "optimizer_step": optimizers.steps_taken(self.optimizer, self.prepared.masters()),
            "loss_scale": self.scale.state(),
            "before": self.before,
            "ledger": self.ledger.state(),
        }

    def seal(self, seconds: float = 0.0) -> float:
        """List the compiled graphs that are kept; return the seconds that they once took."""
        return self.cache.seal(seconds) if self.cache else 0.0

    @contextmanager
    def computing(self, account: str) -> Iterator[None]:
        """Book what the device's compiler does inside to "compile", and not to the account."""
        before = self.accelerator.compile_seconds()
        yield
        spent = self.accelerator.compile_seconds() - before
        self.ledger.move(account, "compile", spent)

    def save(self, metrics: dict[str, float]) -> None:
        """Save this moment; writing goes on beside the next steps."""
        with self.ledger.spend("checkpoint"):
            self.saver.save(self.step, self.values(), self.state(), metrics)

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        path = newest(self.folder / "checkpoints", self.world)
        if path is None:
            return False
        if not self.optimizer.state:
            optimizers.prime(self.optimizer)
        state = load(path, self.values())
        optimizers.set_steps_taken(self.optimizer, self.prepared.masters(), state["optimizer_step"])
        self.prepared.publish()
        self.prepared.clear_gradients()
        self.step = self.resumed_step = state["step"]
        self.attempt = state["attempt"] + 1
        self.before = state["before"]
        self.scale.restore(state["loss_scale"])
        self.ledger.restore(state["ledger"], last_line(self.folder / "ledger.jsonl"))
        return True


def join(accelerator: Accelerator, world: World, timeout_seconds: int) -> None:
    """Meet the other processes of the run."""
    if world.size > 1 and not dist.is_initialized():
        dist.init_process_group(
            accelerator.collectives(),
            init_method=accelerator.rendezvous(),
            rank=world.rank,
            world_size=world.size,
            timeout=dt.timedelta(seconds=timeout_seconds),
        )


def open_session(settings: Training, world: World, dataset: Dataset) -> Session:
    """Return an assembled session; `settings` are decided ones."""
    accelerator, strategy, execution = settings.accelerator, settings.strategy, settings.execution
    if accelerator is None or strategy is None:
        raise SettingsError("nothing was decided", "call decisions.decide first")
    precision = settle_precision(accelerator, execution.precision)
    device = take(accelerator, world.local_rank, execution.threads or 1)
    if execution.compile != "no":
        accelerator.expect_compiling()
    accelerator.use(precision)
    join(accelerator, world, execution.timeout_seconds)
    task, manifest = settings.task, dataset.manifest
    ladder = task.ladder(manifest)
    module = task.module(settings.model, manifest, settings.seed)
    _check_length(module, ladder)
    flops = _flops_per_token(module, ladder[-1])
    module.compute_dtype = COMPUTE_DTYPES[precision]
    site = Site(world, device, module.compute_dtype, tuple(models.blocks(module)), accelerator.lazy)
    prepared = _prepared(module, site, strategy, execution, accelerator)
    rows, batch = dataset.split("train"), settings.batch
    order = Order(len(rows), batch.rows, settings.seed, manifest.identity)
    total = settings.stop.total_steps(order.steps_per_epoch)
    slots = batch.rows * task.texts_per_row()
    return Session(
        settings=settings,
        world=world,
        accelerator=accelerator,
        device=device,
        chip=accelerator.chip(precision),
        manifest=manifest,
        ladder=ladder,
        prepared=prepared,
        optimizer=optimizers.build(
            settings.optimizer, prepared.masters().items(), lazy=accelerator.lazy
        ),
        gradients=Gradients(task, prepared, accelerator, slots),
        order=order,
        feed=feed(
            task, dataset, world, split="train", rows=batch.microbatch_rows, seed=settings.seed
        ),
        heldout=feed(
            task,
            dataset,
            world,
            split="heldout",
            rows=settings.evaluation.microbatch_rows or batch.microbatch_rows,
            seed=settings.seed,
        ),
        cache=_cache(settings, module, ladder, world),
        saver=Saver(
            Path(settings.output.folder) / "checkpoints", settings.output.checkpoint, world
        ),
        ledger=Ledger(settings.stop.usd_per_hour),
        scale=LossScale(scaled=precision == "fp16"),
        rates=optimizers.Rates(settings.optimizer, total, device, lazy=accelerator.lazy),
        interval=Interval(device),
        flops_per_token=flops,
    )


def _prepared(
    module: TextModule,
    site: Site,
    strategy: Strategy,
    execution: Execution,
    accelerator: Accelerator,
) -> Prepared:
    """Return the module on its processes, with its blocks recomputed and compiled as is asked."""
    recompute.install(site.blocks, execution.activation_checkpointing, module.dropout_keys)
    prepared = strategy.prepare(module, site)
    if execution.activation_checkpointing != "none":
        prepared.recomputes = True
    if execution.compile == "blocks":
        backend, options = accelerator.compile_backend(), accelerator.compile_options()
        for block in site.blocks:
            block.compile(dynamic=False, backend=backend, options=options or None)
    return prepared


def _cache(
    settings: Training, module: TextModule, ladder: tuple[int, ...], world: World
) -> Entry | None:
    """Return the graphs that are kept for the run, in use from now on."""
    root, accelerator = settings.execution.compile_cache, settings.accelerator
    if root is None or accelerator is None:
        return None
    found = caches.facts(settings, module, ladder, world)
    entry = caches.open_entry(Path(root).resolve(), found, world)
    accelerator.use_cache(entry.graphs)
    return entry


def feed(task: Task, dataset: Dataset, world: World, *, split: str, rows: int, seed: int) -> Feed:
    """Return the batches of a split for this process, `rows` rows a microbatch."""
    facts = dataset.manifest.tokenizer
    return Feed(
        task,
        dataset.split(split),
        facts=Facts(facts.vocabulary, facts.pad, facts.mask, facts.special),
        microbatch_rows=rows,
        ladder=task.ladder(dataset.manifest),
        share=Share(world.rank, world.size),
        seed=seed,
    )


def _check_length(module: TextModule, ladder: tuple[int, ...]) -> None:
    limit = module.longest
    if limit is not None and ladder[-1] > limit:
        raise SettingsError(
            f"rows of {ladder[-1]} tokens do not fit the model's {limit} positions",
            "prepare shorter rows, or raise model.config.max_position_embeddings",
        )


def _flops_per_token(module: Any, length: int) -> float:
    """Return training FLOPs per token: 6 N + 12 L h S (Chowdhery et al., 2022, appendix B).

    N counts the weights of the blocks that enter matrix products; heads are left out.
    """
    config = module.model.config
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return float(6 * models.matmul_parameters(module) + attention)
