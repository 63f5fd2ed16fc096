"""Resolves optimizer settings whose defaults depend on the initial weights; no torch here.

| initial weights | learning_rate | betas | warmup_steps |
| --- | --- | --- | --- |
| random | 5e-4 | 0.9, 0.98 | 0 |
| pretrained | 2e-5 | 0.9, 0.999 | 10 % of the steps |
| pretrained, with LoRA adapters | 2e-4 | 0.9, 0.999 | 10 % of the steps |
| pretrained and frozen, below a task head | 5e-4 | 0.9, 0.98 | 0 |

The betas for random weights are from Liu et al., 2019, "RoBERTa", section 3.1. The rate and warm-up
for pretrained weights are from Devlin et al., 2019, "BERT", appendix A.3. The LoRA rate is from Hu
et al., 2021, "LoRA", appendix D. A head on a frozen encoder is trained like random weights, because
a low rate only protects pretrained weights that are trained.

A run that continues an earlier run's schedule or optimizer state takes its values. Later attempts
take the first attempt's values from `run.json`, so another run length does not change them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regauge import config
from regauge.system.errors import DataError
from regauge.training import run_record
from regauge.training.settings import AUTO, TrainSettings

if TYPE_CHECKING:
    from regauge.models.settings import Model
    from regauge.training.settings import Optimizer

S = TypeVar("S", bound=TrainSettings)
LEARNING_RATE, BETAS = "optimizer.learning_rate", "optimizer.betas"
WARMUP_STEPS = "optimizer.schedule.warmup_steps"
RANDOM_RATE, PRETRAINED_RATE, LORA_RATE = 5e-4, 2e-5, 2e-4
HEAD_OUTPUTS = frozenset({"classes", "values", "scores", "entities"})
"""Outputs of tasks whose head is not part of a pretrained model."""
WARMUP_DIVISOR = 10
"""Pretrained weights warm up for the run length divided by this."""
FIRST_ATTEMPT = "the first attempt of this run"


@dataclass(frozen=True)
class OptimizerDefaults:
    """Values for optimizer settings left open in a run file."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values by key; empty if the run file sets all of them."""
    reason: str = ""
    """What the values were chosen for, such as `random weights`."""

    @property
    def description(self) -> str:
        assignments = [
            f"{key.rpartition('.')[2]} {_format(self.values[key])}" for key in self.values
        ]
        return f"{', '.join(assignments)} (default of {self.reason})"

    @property
    def document(self) -> dict[str, Any]:
        return {"values": self.values, "reason": self.reason}


def resolve_optimizer(settings: S) -> tuple[S, OptimizerDefaults]:
    """Resolve optimizer settings that are "auto"; also return their values and the reason.

    Raises DataError if the warm-up depends on a dataset's rows and these cannot be read.
    """
    open_keys = _list_open_keys(settings.optimizer)
    if not open_keys:
        return settings, OptimizerDefaults()
    earlier = _read_first_attempt(Path(settings.output.folder))
    known = {key: earlier.values[key] for key in open_keys if key in earlier.values}
    if len(known) == len(open_keys):
        defaults = OptimizerDefaults(known, earlier.reason)
    else:
        defaults = _choose_values(settings, open_keys)
    return _apply(settings, defaults.values), defaults


def describe_optimizer(settings: TrainSettings) -> dict[str, str]:
    """Return the optimizer settings and the reason for the defaults, for `--dry-run`."""
    try:
        resolved, defaults = resolve_optimizer(settings)
    except DataError:  # the dataset is not prepared yet
        return {}
    optimizer = resolved.optimizer
    values = {
        LEARNING_RATE: optimizer.peak_learning_rate,
        BETAS: optimizer.moment_decay_rates,
        WARMUP_STEPS: optimizer.schedule.num_warmup_steps,
    }
    if not defaults.values:
        return {}
    return {"optimizer": OptimizerDefaults(values, defaults.reason).description}


def _list_open_keys(optimizer: Optimizer) -> list[str]:
    values = {
        LEARNING_RATE: optimizer.learning_rate,
        BETAS: optimizer.betas,
        WARMUP_STEPS: optimizer.schedule.warmup_steps,
    }
    return [key for key, value in values.items() if value == AUTO]


def _read_first_attempt(folder: Path) -> OptimizerDefaults:
    try:
        facts = (run_record.read_run(folder) or {}).get(config.RUN_IDENTITY, {})
    except DataError:
        return OptimizerDefaults()
    document = facts.get(run_record.DEFAULTS, {})
    return OptimizerDefaults(document.get("values", {}), document.get("reason", FIRST_ATTEMPT))


def _choose_values(settings: TrainSettings, open_keys: list[str]) -> OptimizerDefaults:
    model = settings.model
    is_pretrained = model.path is not None and model.weights == "pretrained"
    values: dict[str, Any] = {LEARNING_RATE: RANDOM_RATE, BETAS: (0.9, 0.98), WARMUP_STEPS: 0}
    reason = "random weights"
    if is_pretrained and _trains_only_head(settings):
        reason = "a head on a frozen encoder"
    elif is_pretrained or model.lora is not None:
        rate = LORA_RATE if model.lora else PRETRAINED_RATE
        values |= {LEARNING_RATE: rate, BETAS: (0.9, 0.999)}
        reason = "LoRA adapters" if model.lora else "pretrained weights"
        if WARMUP_STEPS in open_keys:
            values[WARMUP_STEPS] = _count_warmup_steps(settings)
    continued = _read_continued_values(model)
    if continued.keys() & set(open_keys):
        reason = f"{reason}, continuing {model.init_from.path if model.init_from else ''}"
    values |= continued
    return OptimizerDefaults({key: values[key] for key in open_keys}, reason)


def _trains_only_head(settings: TrainSettings) -> bool:
    """Return whether the encoder is frozen, and each task has a head that pre-training lacks."""
    if settings.model.trainable_layers not in {"none", 0}:
        return False
    return all(config.task.output_kind() in HEAD_OUTPUTS for config in settings.task_configs)


def _count_warmup_steps(settings: TrainSettings) -> int:
    """Return a tenth of the run's steps, rounded up."""
    from regauge.training.task_schedule import count_total_steps

    return -(-count_total_steps(settings) // WARMUP_DIVISOR)


def _read_continued_values(model: Model) -> dict[str, Any]:
    """Return the values of the earlier run whose schedule or optimizer state is continued."""
    origin = model.init_from
    if origin is None or (origin.schedule == "restart" and origin.optimizer == "reset"):
        return {}
    table = config.read_saved_run(Path(origin.path))["optimizer"]
    flat = dict(config.flatten({"optimizer": table}))
    keys = [BETAS] if origin.optimizer == "keep" else []
    keys += [LEARNING_RATE, WARMUP_STEPS] if origin.schedule == "continue" else []
    return {key: flat[key] for key in keys if key in flat}


def _apply(settings: S, values: dict[str, Any]) -> S:
    optimizer = settings.optimizer
    update: dict[str, Any] = {}
    if LEARNING_RATE in values:
        update["learning_rate"] = values[LEARNING_RATE]
    if BETAS in values:
        update["betas"] = tuple(values[BETAS])
    if WARMUP_STEPS in values:
        steps = {"warmup_steps": values[WARMUP_STEPS]}
        update["schedule"] = optimizer.schedule.model_copy(update=steps)
    return settings.model_copy(update={"optimizer": optimizer.model_copy(update=update)})


def _format(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(f'{item:g}' for item in value)})"
    return f"{value:g}"
