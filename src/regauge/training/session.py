"""What one process of one attempt of a run holds: everything that the loop drives."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regauge import jsonl
from regauge.accelerators import Accelerator, Chip
from regauge.checkpoint.loading import load
from regauge.checkpoint.saver import Saver
from regauge.errors import DataError
from regauge.faults import Chaos, shift
from regauge.strategies import Prepared
from regauge.supervision.channel import Report
from regauge.supervision.cost_meter import say_seen
from regauge.training import optimizer as optimizers
from regauge.training.compile.cache import Entry
from regauge.training.gradients import LossScale
from regauge.training.guards import Guard, check_replicas
from regauge.training.heldout import Heldout
from regauge.training.ledger import Ledger
from regauge.training.metrics import Interval, Pace
from regauge.training.objectives import Objective, Turns, identity
from regauge.training.warm_start import checkpoint, steps_before

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from regauge.data.batches import Arrays
    from regauge.models.init_weights import FirstWeights
    from regauge.models.settings import Origin
    from regauge.processes import World
    from regauge.training.settings import Training


MOMENTS = "optimizer."
"""Beginning of the names of the optimizer's tensors in a checkpoint."""


class Shape(NamedTuple):
    """Batches of one size."""

    objective: Objective
    length: int


@dataclass
class Session:
    """What one process of one attempt holds."""

    settings: Training
    world: World
    accelerator: Accelerator
    device: torch.device
    chip: Chip
    objectives: tuple[Objective, ...]
    """The tasks, in the order of the settings."""
    turns: Turns
    """Whose step it is."""
    prepared: Prepared
    optimizer: torch.optim.Optimizer
    mark: Callable[[], None]
    """Ends a microbatch for the device, and gives a sign of life."""
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
    first: FirstWeights
    """The weights of step 0."""
    step: int = 0
    """Steps that are done."""
    attempt: int = 1
    resumed_step: int = 0
    before: dict[str, float] = field(default_factory=dict)
    """The held-out metrics before the first step."""

    @property
    def weights(self) -> str:
        """What the bits of the weights of step 0 add up to."""
        return _told(self.first.sums.values())

    @property
    def frozen(self) -> str:
        """What the bits of those that are not trained add up to; empty where all are."""
        sums = self.first.sums
        named = self.prepared.module.named_parameters()
        found = [sums[name] for name, value in named if not value.requires_grad]
        return _told(found) if found else ""

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.settings.output.folder)

    @property
    def objective(self) -> Objective:
        """The task of the step that comes next."""
        return self.objectives[self.turns.at(self.step).task]

    @property
    def steps_per_epoch(self) -> int:
        """The steps of a pass over the rows of the first task."""
        return self.turns.steps_per_epoch(self.objectives[0].order.steps_per_epoch)

    @property
    def total_steps(self) -> int:
        """The length of the run."""
        return self.settings.stop.total_steps(self.steps_per_epoch)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape that batches have."""
        return tuple(Shape(each, length) for each in self.objectives for length in each.ladder)

    @property
    def heldout(self) -> dict[str, Heldout]:
        """What is measured, by the beginning of its metrics' names; empty where nothing is."""
        return {name: found for each in self.objectives for name, found in each.heldout.items()}

    @property
    def flops_per_token(self) -> float:
        """What training on a token takes; of several tasks, the mean over their turns."""
        pairs = zip(self.turns.weights, self.objectives, strict=True)
        return sum(n * each.flops_per_token for n, each in pairs) / sum(self.turns.weights)

    def arrays(self, step: int) -> list[Arrays]:
        """Return this process's batches of a step."""
        task, own = self.turns.at(step)
        found = self.objectives[task]
        numbers = found.order.batch(own, shift(self.chaos, step))
        return found.feed.batches(numbers, epoch=found.order.epoch(own), step=step)

    def values(self) -> dict[str, torch.Tensor]:
        """Return every tensor of a checkpoint that this process holds, by its saved name."""
        masters = self.prepared.masters()
        moments = optimizers.tensors(self.optimizer, masters)
        return {
            **{f"model.{name}": value.detach() for name, value in masters.items()},
            **{f"{MOMENTS}{name}": value for name, value in moments.items()},
        }

    def state(self) -> dict[str, Any]:
        """Return the rest of a checkpoint: JSON-ready, and equal for equal runs."""
        return {
            "step": self.step,
            "seed": self.settings.seed,
            "data_identity": identity([each.manifest for each in self.objectives]),
            "attempt": self.attempt,
            "frozen": self.frozen,
            "optimizer_step": optimizers.steps_taken(self.optimizer, self.prepared.masters()),
            "loss_scale": self.scale.state(),
            "guard": self.guard.state(),
            "before": self.before,
            "steps_before": self.rates.before,
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
            state = self.state()
            if self.world.first:
                say_seen(Path(self.settings.output.folder))
            self.saver.save(self.step, self.values(), state, metrics)
            if self.accelerator.lazy:  # operations of two threads would be one graph
                self.saver.settle()

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
        self.ledger.restore(state["ledger"], jsonl.last(self.folder / "ledger.jsonl"))
        return True

    def go_on(self, origin: Origin) -> None:
        """Take over what the settings say of an earlier run beside its weights."""
        self.rates.before = steps_before(origin)
        if origin.optimizer == "fresh":
            return
        optimizers.prime(self.optimizer)
        path = checkpoint(origin)
        moments = {name: value for name, value in self.values().items() if name.startswith(MOMENTS)}
        count = load(path, moments)["optimizer_step"]
        optimizers.set_steps_taken(self.optimizer, self.prepared.masters(), count)

    def restore(self, path: Path) -> dict[str, Any]:
        """Go to a whole checkpoint, and return the rest of what it holds.

        Weights that are not trained are in none: they are those of step 0. Raises DataError where
        they are others now.
        """
        self.saver.settle()
        if not self.optimizer.state:
            optimizers.prime(self.optimizer)
        state = load(path, self.values())
        if state.get("frozen", self.frozen) != self.frozen:
            raise DataError(
                f"the weights that {path} adds to are no longer those of model.path",
                "put them back, or start a new run in another output.folder",
            )
        optimizers.set_steps_taken(self.optimizer, self.prepared.masters(), state["optimizer_step"])
        self.prepared.publish()
        self.prepared.clear_gradients()
        self.step = self.resumed_step = state["step"]
        self.before = state["before"]
        self.rates.before = state.get("steps_before", 0)
        self.scale.restore(state["loss_scale"])
        self.guard.restore(state["guard"])
        return state


def _told(sums: Iterable[int]) -> str:
    return f"{sum(sums) % 2**64:016x}"
