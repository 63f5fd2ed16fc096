"""What one process of one attempt of a run holds: everything that the loop drives."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regauge import lines
from regauge.accelerators import Accelerator, Chip
from regauge.checkpoint.loading import load
from regauge.checkpoint.saver import Saver
from regauge.data.loader import Feed
from regauge.data.order import Order
from regauge.strategies import Prepared
from regauge.supervision.chaos import Chaos
from regauge.supervision.orders import Report
from regauge.training import optimizer as optimizers
from regauge.training.cache import Entry
from regauge.training.guard import Guard
from regauge.training.ledger import Ledger
from regauge.training.pace import Pace
from regauge.training.progress import Interval
from regauge.training.replicas import check_replicas
from regauge.training.scaling import LossScale
from regauge.training.step import Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.data.shards import Manifest
    from regauge.processes import World
    from regauge.training.settings import Training


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
    mark: Callable[[], None]
    """Ends a microbatch for the device, and gives a sign of life."""
    order: Order
    feed: Feed
    heldout: Feed
    saver: Saver
    cache: Entry | None
    ledger: Ledger
    report: Report
    chaos: Chaos
    scale: LossScale
    guard: Guard
    rates: optimizers.Rates
    interval: Interval
    pace: Pace
    flops_per_token: float
    weights: str
    """What the weights of step 0 add up to, as `replicas.digest` does, before they are placed."""
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
            "guard": self.guard.state(),
            "before": self.before,
            "ledger": self.ledger.state(),
        }

    def seal(self, seconds: float = 0.0) -> float:
        """List the compiled graphs that are kept; return the seconds that they once took."""
        return self.cache.seal(seconds) if self.cache else 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Book what the device's compiler does inside to "compile", and not to what is open."""
        before = self.accelerator.compile_seconds()
        yield
        spent = self.accelerator.compile_seconds() - before
        self.ledger.move("compile", spent)

    def save(self, metrics: dict[str, float]) -> None:
        """Save this moment, once all replicas agree; writing goes on beside the next steps."""
        with self.ledger.spend("checkpoint"):
            self.check_replicas()
            self.saver.save(self.step, self.values(), self.state(), metrics)

    def check_replicas(self) -> None:
        """Raise DeviceError where processes that should hold equal weights do not."""
        check_replicas(self.prepared.replicas(), self.world, self.step)

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        path = self.saver.newest()
        if path is None:
            return False
        state = self.restore(path)
        self.attempt = state["attempt"] + 1
        self.ledger.restore(state["ledger"], lines.last(self.folder / "ledger.jsonl"))
        return True

    def restore(self, path: Path) -> dict[str, Any]:
        """Go to a whole checkpoint, and return the rest of what it holds."""
        if not self.optimizer.state:
            optimizers.prime(self.optimizer)
        state = load(path, self.values())
        optimizers.set_steps_taken(self.optimizer, self.prepared.masters(), state["optimizer_step"])
        self.prepared.publish()
        self.prepared.clear_gradients()
        self.step = self.resumed_step = state["step"]
        self.before = state["before"]
        self.scale.restore(state["loss_scale"])
        self.guard.restore(state["guard"])
        return state
