"""The documents of an output folder that say what ran: `run.json` and `environment.json`.

A folder belongs to one run. What may differ when the run is started again is how it is computed
and when it stops; what it computes may not.
"""

from __future__ import annotations

import json
import platform
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from regauge import processes
from regauge.config import FACTS, FORMAT, Tables, dump, first_difference
from regauge.errors import SettingsError
from regauge.files import write_json
from regauge.log import logger
from regauge.training.defaults import PROBE
from regauge.training.warm_start import START

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.training.settings import Training

RUN = "run.json"
ENVIRONMENT = "environment.json"
RESULT = "result.json"
TASKS = "tasks"
"""Folder with the models of the tasks behind the first."""
IDENTITY = (
    "seed",
    "task",
    "model",
    "optimizer",
    "batch.rows",
    "data.mix",
    "data.identity",
)
"""What makes two runs the same; everything else may change between attempts."""
VARIABLES = ("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "KMP_", "GOMP_", "MKL_")
"""Beginnings of the environment variables that torch and its threads read, on every device."""
PACKAGES = ("regauge", "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy")


def build_document(settings: Training, identity: str, run_id: str, weights: str = "") -> Tables:
    """Return the content of run.json: the settings, who they belong to, and the first weights."""
    facts = {
        "format": FORMAT,
        "verb": "train",
        "id": run_id,
        "data_identity": identity,
        "weights": weights,
    }
    return {**dump(settings), FACTS: facts}


def read_run(folder: Path) -> Tables | None:
    """Return the run.json of an output folder, or None."""
    path = folder / RUN
    if not path.exists():
        return None
    try:
        saved: Tables = json.loads(path.read_text())
    except ValueError:
        raise SettingsError(f"{path} is damaged", "name another output.folder") from None
    return saved


def check_same_run(folder: Path, settings: Training, identity: str) -> str:
    """Return the id of the run that owns a folder, a new one for a new folder.

    Raises SettingsError when another run lives there, naming the first difference.
    """
    saved = read_run(folder)
    if saved is None:
        _check_empty(folder)
        return uuid.uuid4().hex[:12]
    facts = saved.get(FACTS, {})
    now = build_document(settings, identity, "")
    now["data"]["identity"], saved["data"]["identity"] = identity, facts.get("data_identity")
    now["task"], saved["task"] = _tasks(now["task"]), _tasks(saved["task"])
    for each in (now, saved):
        each["model"].pop("attention", None)  # it says how a model is computed
    for key in IDENTITY:
        ours, theirs = _at(now, key), _at(saved, key)
        if ours != theirs:
            difference = first_difference(key, ours, theirs)
            raise SettingsError(
                f"{folder} belongs to another run: {difference}",
                "name another output.folder, or set it back to go on with that run",
            )
    return str(facts["id"])


def inherit_decisions(settings: Training, folder: Path) -> Training:
    """Return settings with what the run's first attempt decided, where this one leaves it open."""
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
    folder: Path, settings: Training, identity: str, run_id: str, weights: str
) -> None:
    """Save what will run, and on what, before the first step."""
    folder.mkdir(parents=True, exist_ok=True)
    now, before = build_document(settings, identity, run_id, weights), read_run(folder)
    if before is not None:
        _say_other_length(now, before)
    write_json(folder / RUN, now)
    found = environment(settings.accelerator.variables if settings.accelerator else ())
    if found["variables"] and found["variables"] != _variables_before(folder):
        said = ", ".join(f"{name}={value}" for name, value in found["variables"].items())
        logger.info("set from outside, and recorded: %s", said)
    write_json(folder / ENVIRONMENT, found)


def environment(variables: tuple[str, ...]) -> dict[str, Any]:
    """Return the versions, the machine and the foreign variables that a run depends on."""
    read = (*VARIABLES, *variables)
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "variables": {
            name: value
            for name, value in sorted(processes.INHERITED.items())
            if name.startswith(read) and name not in processes.RECORDER
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_empty(folder: Path) -> None:
    """Raise SettingsError for a folder in use; what the first process of this run writes is not."""
    strangers = [path.name for path in folder.glob("*")] if folder.is_dir() else []
    known = {RUN, ENVIRONMENT, "ranks", "metrics.jsonl", "ledger.jsonl", "attempts.jsonl"}
    known |= {"failures", "faults.jsonl", START, PROBE}
    foreign = [name for name in strangers if name not in known and not name.startswith(".")]
    if foreign:
        raise SettingsError(
            f"{folder} holds something else ({min(foreign)}) and no run",
            "name another output.folder",
        )


def _variables_before(folder: Path) -> Any:
    """Return the foreign variables that the attempt before this one has recorded."""
    try:
        return json.loads((folder / ENVIRONMENT).read_text())["variables"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _say_other_length(now: Tables, before: Tables) -> None:
    """Warn where a run of another length has another learning rate from here on."""
    schedule = now["optimizer"]["schedule"]["kind"]
    for key in ("stop.steps", "stop.epochs"):
        ours, theirs = _at(now, key), _at(before, key)
        if ours != theirs and schedule != "constant":
            difference = first_difference(key, ours, theirs)
            logger.warning("%s: the %s schedule now ends elsewhere", difference, schedule)


def _tasks(found: Any) -> Any:
    """Return a run's task, or of each of several by its name what may not change."""
    if isinstance(found, dict):
        return found
    told = {}
    for each in found:
        data, batch = each.get("data") or {}, each.get("batch", {})
        own = {"data": {"mix": data.get("mix")}, "batch": {"rows": batch.get("rows")}}
        told[each["name"]] = each | own
    return told


def _at(tables: Tables, key: str) -> Any:
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
