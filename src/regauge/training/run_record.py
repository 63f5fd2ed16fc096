"""Writes and compares the records in a run folder: `run.json`, `environment.json`.

A folder belongs to one run. When the run is started again, execution and stop settings may differ.
Settings that identify the run (`IDENTITY_KEYS`) may not.
"""

from __future__ import annotations

import logging
import platform
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from regauge import accelerators
from regauge.config import (
    FORMAT,
    RUN_IDENTITY,
    Tables,
    describe_first_difference,
    dump,
    find_saved_run,
)
from regauge.config.output_files import (
    ATTEMPTS,
    ENVIRONMENT,
    FAILURES,
    FAULTS,
    LEDGER,
    METRICS,
    RANKS,
    RESULT,
    SAVED_RUN,
)
from regauge.monitoring.exporter import EXPORTERS
from regauge.monitoring.notify.delivery import JOURNAL
from regauge.system import processes
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import check_folder, check_own_folder, write_json
from regauge.system.json_files import find_json
from regauge.system.log import logger
from regauge.system.scratch import is_default_cache
from regauge.training.model_card import write_card
from regauge.training.warm_start import START_FOLDER

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from regauge.accelerators import Accelerator
    from regauge.training.settings import Stop, TrainSettings

DEFAULTS = "defaults"
"""Key in the `run` table: optimizer settings left open in the run file."""
PRECISION = "precision"
"""Key in the `run` table: the reason for a precision left open in the run file."""
PROBE = "probe"
"""Folder in the run folder: measured decisions and the trials behind them."""
ADAPTER = "adapter"
"""Folder next to a model with its LoRA adapters."""
TARGET_REACHED = "reached "
"""Start of the stop reason when a run reaches its target."""
NO_IMPROVEMENT = "no better "
"""Start of the stop reason when a run's patience ends."""
TASKS = "tasks"
"""Folder for the models of all tasks but the first."""
IDENTITY_KEYS = (
    "seed",
    "task",
    "model",
    "optimizer",
    "batch.rows",
    "data.mix",
    "data.fingerprint",
)
"""Settings that identify a run; all others may change between attempts."""
VARIABLE_PREFIXES = ("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "KMP_", "GOMP_", "MKL_")
"""Prefixes of environment variables read by torch and its thread libraries."""
PACKAGES = ("regauge", "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy")


def build_document(
    settings: TrainSettings, fingerprint: str, run_id: str, weights_checksum: str = ""
) -> Tables:
    """Return the content for run.json: settings, and what identifies the run.

    `fingerprint` is the data hash, `weights_checksum` that of the initial weights.
    """
    facts = {
        "format": FORMAT,
        "verb": "train",
        "run_id": run_id,
        "data_fingerprint": fingerprint,
        "weights_checksum": weights_checksum,
    }
    return {**dump(settings), RUN_IDENTITY: facts}


def read_run(folder: Path) -> Tables | None:
    """Read a folder's run.json; None if it is missing.

    Raises DataError if it is damaged.
    """
    return find_saved_run(folder, "name another output.folder")


def check_same_run(folder: Path, settings: TrainSettings, fingerprint: str) -> str:
    """Return the id of the run that owns a folder; a new id for a new folder.

    Raises SettingsError with the first difference if the folder belongs to another run.
    """
    saved = read_run(folder)
    if saved is None:
        _check_empty(folder)
        return uuid.uuid4().hex[:12]
    facts = saved.get(RUN_IDENTITY, {})
    current = build_document(settings, fingerprint, "")
    current["data"]["fingerprint"] = fingerprint
    saved["data"]["fingerprint"] = facts.get("data_fingerprint")
    for document in (current, saved):
        document["task"] = _index_tasks(document["task"])
        document["model"].pop("attention", None)  # a setting of the execution
    for key in IDENTITY_KEYS:
        ours, theirs = _get_value(current, key), _get_value(saved, key)
        if ours != theirs:
            difference = describe_first_difference(key, ours, theirs)
            raise SettingsError(
                f"{folder} belongs to another run: {difference}",
                "name another output.folder, or restore that setting to resume the run",
            )
    return str(facts["run_id"])


def find_result(folder: Path, settings: TrainSettings, total_steps: int) -> Tables | None:
    """Return the result if all steps and models are done; None if work remains.

    A run that ended before its last step is finished as long as the same settings would end it.
    """
    try:
        result, saved = find_json(folder / RESULT, "remove it"), read_run(folder)
    except DataError:
        return None
    if result is None or saved is None or not all(map(_has_weights, _list_models(folder, saved))):
        return None
    if not isinstance(result.get("steps"), int):
        return None
    has_all_steps = result["steps"] >= total_steps
    return result if has_all_steps or _is_ended_early(result, saved, settings.stop) else None


def _is_ended_early(result: Tables, saved: Tables, stop: Stop) -> bool:
    reason, saved_stop = str(result.get("stop_reason")), saved.get("stop", {})
    if reason.startswith(TARGET_REACHED):
        return bool(saved_stop.get("target") == (dump(stop.target) if stop.target else None))
    if not reason.startswith(NO_IMPROVEMENT) or stop.patience is None:
        return False
    return stop.patience <= (saved_stop.get("patience") or 0)


def _list_models(folder: Path, saved: Tables) -> list[Path]:
    tasks = saved["task"] if isinstance(saved["task"], list) else [{}]
    other_tasks = [folder / TASKS / str(task["name"]) / "model" for task in tasks[1:]]
    return [folder / "model", *other_tasks]


def _has_weights(model: Path) -> bool:
    return any(model.glob("*.safetensors"))


def inherit_decisions(settings: TrainSettings, folder: Path) -> TrainSettings:
    saved = (read_run(folder) or {}).get("execution", {})
    execution = settings.execution
    update: dict[str, Any] = {}
    if execution.precision == "auto" and "precision" in saved:
        update["precision"] = saved["precision"]
    if execution.compile == "auto" and "compile" in saved:
        update["compile"] = saved["compile"]
    if execution.threads is None and execution.processes == saved.get("processes"):
        update["threads"] = saved.get("threads")
    return settings.model_copy(update={"execution": execution.model_copy(update=update)})


def write_records(
    folder: Path,
    settings: TrainSettings,
    fingerprint: str,
    run_id: str,
    weights_checksum: str,
    *,
    device: Tables | None = None,
    decisions: Tables | None = None,
) -> None:
    """Write run.json and environment.json, before the first step.

    `device` describes this attempt's accelerator. The first attempt's `decisions` remain those of
    the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_own_folder(folder / "model")
    document = build_document(settings, fingerprint, run_id, weights_checksum)
    previous = read_run(folder)
    if previous is not None:
        _warn_changed_length(document, previous)
    recorded = (previous or {}).get(RUN_IDENTITY, {})
    first = {key: recorded[key] for key in (DEFAULTS, PRECISION) if key in recorded}
    document[RUN_IDENTITY] |= {**(decisions or {}), **first}
    write_json(folder / SAVED_RUN, document)
    accelerator = settings.accelerator
    environment = describe_environment(accelerator.env_prefixes if accelerator else ())
    before = _read_previous_environment(folder)
    if device is not None:
        environment["device"] = device
        _warn_changed_device(device, before.get("device"))
    variables = environment["variables"]
    if variables and variables != before.get("variables"):
        assignments = ", ".join(f"{name}={value}" for name, value in variables.items())
        logger.info("environment variables that affect the run: %s", assignments)
    write_json(folder / ENVIRONMENT, environment)


def write_result(folder: Path, result: dict[str, Any]) -> None:
    for model in ("model", ADAPTER):
        for path in sorted([folder / model, *folder.glob(f"{TASKS}/*/{model}")]):
            if path.is_dir():
                write_card(folder, path, result)
    write_json(folder / RESULT, result)


def describe_device(
    accelerator: Accelerator, device: torch.device, *, is_requested: bool
) -> dict[str, Any]:
    """Describe the accelerator, its device, why it was chosen, and which were refused."""
    choice = accelerators.describe_choice(accelerator, is_requested=is_requested)
    return {
        "kind": choice.kind,
        "type": device.type,
        "is_requested": is_requested,
        "reason": choice.reason,
        "refused": dict(choice.refused),
        "fp32_products": accelerator.fp32_settings(),
    }


def describe_environment(prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Describe package versions, machine and environment variables.

    `prefixes` select further variables, which the device reads.
    """
    prefixes = (*VARIABLE_PREFIXES, *prefixes)
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": {name: number for name in PACKAGES if (number := _version(name))},
        "variables": {
            name: value
            for name, value in sorted(processes.INHERITED_ENVIRONMENT.items())
            if name.startswith(prefixes)
            and name not in processes.FLIGHT_RECORDER_VARIABLES
            and (name, value) not in processes.SPIN_VARIABLES.items()
            and not is_default_cache(name, value)
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_empty(folder: Path) -> None:
    """Raise SettingsError if the folder has files that no process of a new run has written."""
    check_folder(folder, "output.folder")
    names = [path.name for path in folder.glob("*")] if folder.is_dir() else []
    known = {SAVED_RUN, ENVIRONMENT, RANKS, METRICS, LEDGER, ATTEMPTS}
    known |= {FAILURES, FAULTS, EXPORTERS, JOURNAL, START_FOLDER, PROBE}
    foreign = [name for name in names if name not in known and not name.startswith(".")]
    if foreign:
        raise SettingsError(
            f"{folder} contains other files ({min(foreign)}) and no run",
            "name another output.folder",
        )


def _read_previous_environment(folder: Path) -> Tables:
    """Return the previous attempt's environment; empty if it is unknown."""
    try:
        return find_json(folder / ENVIRONMENT, "remove it") or {}
    except DataError:
        return {}


def _warn_changed_device(current: Tables, previous: Any) -> None:
    """Warn if a resumed run computes on another kind of device, unless its settings name it."""
    if not isinstance(previous, dict) or previous.get("kind") == current["kind"]:
        return
    message = "this attempt runs on accelerator '%s', the previous one ran on '%s': %s"
    level = logging.INFO if current["is_requested"] else logging.WARNING
    logger.log(level, message, current["kind"], previous.get("kind"), current["reason"])


def _warn_changed_length(current: Tables, previous: Tables) -> None:
    """Warn if a changed run length changes the remaining steps' learning rate."""
    schedule = current["optimizer"]["schedule"]["kind"]
    ours, theirs = _describe_length(current), _describe_length(previous)
    if ours != theirs and schedule != "constant":
        message = "%s in the run before, and %s now: this changes the %s schedule"
        logger.warning(message, theirs, ours, schedule)


def _describe_length(tables: Tables) -> str:
    lengths = ((key, _get_value(tables, key)) for key in ("stop.steps", "stop.epochs"))
    texts = [f"{key} = {length}" for key, length in lengths if length is not None]
    return " and ".join(texts) or "no length"


def _index_tasks(tasks: Any) -> Any:
    """Return a single task's table, or task name -> table.

    In a task's `data` and `batch` tables, only keys that identify a run remain.
    """
    if isinstance(tasks, dict):
        return tasks
    tables = {}
    for table in tasks:
        data, batch = table.get("data") or {}, table.get("batch", {})
        identity = {"data": {"mix": data.get("mix")}, "batch": {"rows": batch.get("rows")}}
        tables[table["name"]] = table | identity
    return tables


def _get_value(tables: Tables, key: str) -> Any:
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
