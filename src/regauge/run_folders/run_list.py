"""Lists the runs below a folder, with one line for each: state, step, metric, cost and host."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import flatten
from regauge.config.output_files import JOBS, RANKS
from regauge.run_folders.checkpoint_files import CHECKPOINTS
from regauge.run_folders.folder_lock import list_held_locks
from regauge.run_folders.node_status import read_node_statuses
from regauge.run_folders.run_tail import is_any_run, read_run_tail
from regauge.system import choices
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.run_folders.folder_lock import FileId
    from regauge.run_folders.run_tail import RunState, RunTail

MAX_DEPTH = 6
"""Maximum number of folders between the root and a run."""
SKIPPED = frozenset({CHECKPOINTS, RANKS, JOBS, "shards", "tensorboard", "mlflow", "wandb"})
"""Names of folders that never contain runs."""


@dataclass(frozen=True)
class RunSummary:
    """One run in a list; unknown values are None."""

    name: str
    """Path relative to the root, or the root's own path."""
    verb: str | None
    state: RunState
    step: int | None
    steps: int | None
    metric: str | None
    """Name of the metric that decides the run."""
    value: float | str | None
    """The final model's value of this metric; while the run has none, the last one."""
    value_step: int | None
    """Step of the value."""
    usd: float | None
    goodput: float | None
    """Productive share of the time, between 0 and 1."""
    attempts: int | None
    host: str | None
    started: str | None
    """First start, as ISO 8601 in UTC."""
    settings: Mapping[str, Any]
    """Dotted key -> run setting."""

    @property
    def row(self) -> dict[str, Any]:
        """The summary as one JSON object, without the settings."""
        document = asdict(self)
        del document["settings"]
        return document


COLUMNS = tuple(name for name in RunSummary.__dataclass_fields__ if name != "settings")


def find_runs(root: Path) -> Iterator[Path]:
    """Yield all run output folders below a folder, sorted by path.

    Hidden folders and links are skipped. Raises SettingsError if the folder does not exist.
    """
    if not root.is_dir():
        raise SettingsError(f"no folder {root}", "name the folder that contains the runs")
    yield from _search(root, 0)


def _search(folder: Path, depth: int) -> Iterator[Path]:
    if is_any_run(folder):
        yield folder
        return
    if depth == MAX_DEPTH:
        return
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # it has vanished, or belongs to another user
        return
    for entry in sorted(entries, key=lambda entry: entry.name):
        if not entry.name.startswith(".") and entry.name not in SKIPPED:
            yield from _search(Path(entry.path), depth + 1)


def list_runs(root: Path) -> list[RunSummary]:
    """Summarize every run below a folder."""
    locks, now = list_held_locks(), time.time()
    return [summarize_run(folder, root, locks, now) for folder in find_runs(root)]


def summarize_run(
    folder: Path, root: Path, locks: frozenset[FileId] | None = None, now: float | None = None
) -> RunSummary:
    """Summarize one output folder; damaged files leave values unknown."""
    now = time.time() if now is None else now
    tail = read_run_tail(folder, locks)
    metric, goodput, began = tail.find_main_metric(), tail.compute_goodput(now), tail.began_at
    value_step, value = tail.find_score(metric) if metric else (None, None)
    return RunSummary(
        name=str(folder if folder == root else folder.relative_to(root)),
        verb=tail.verb,
        state=tail.find_state(now),
        step=tail.step,
        steps=tail.compute_total_steps(),
        metric=metric,
        value=value,
        value_step=value_step,
        usd=tail.compute_usd(now),
        goodput=None if goodput is None else round(goodput.fraction, 4),
        attempts=tail.attempt,
        host=_find_host(folder, tail),
        started=None if began is None else _format_time(began),
        settings=dict(flatten(tail.settings)),
    )


def _find_host(folder: Path, tail: RunTail) -> str | None:
    """Return a run's host, or its first node's host with the number of others."""
    hosts = sorted({node.host for node in read_node_statuses(folder)})
    if len(hosts) > 1:
        return f"{hosts[0]} +{len(hosts) - 1}"
    return next(iter(hosts), tail.lock_owner or None)


def _format_time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC).isoformat(timespec="seconds")


def filter_runs(runs: Iterable[RunSummary], filters: Iterable[str]) -> list[RunSummary]:
    """Return the runs that match all filters `key=pattern`.

    A key is a column or a dotted setting, a pattern may contain `*` and `?`. Raises SettingsError
    for a filter without `=`, and for a key missing from all runs.
    """
    selected = list(runs)
    for text in filters:
        key, separator, pattern = text.partition("=")
        if not separator:
            raise SettingsError(f"the filter '{text}' has no value", "write it as key=value")
        _check_key(key, selected)
        selected = [run for run in selected if fnmatchcase(_format(run, key), pattern)]
    return selected


def sort_runs(runs: Iterable[RunSummary], key: str, *, is_reversed: bool) -> list[RunSummary]:
    """Sort runs by a column or a dotted setting; runs without a value, or with NaN, come last.

    Raises SettingsError for a key missing from all runs.
    """
    runs = list(runs)
    _check_key(key, runs)
    known = [run for run in runs if not _is_unknown(_get(run, key))]
    values = [_get(run, key) for run in known]
    has_numbers = all(isinstance(value, int | float) for value in values)

    def rank(run: RunSummary) -> Any:
        value = _get(run, key)
        return value if has_numbers else str(value)

    unknown = [run for run in runs if _is_unknown(_get(run, key))]
    return [*sorted(known, key=rank, reverse=is_reversed), *unknown]


def _check_key(key: str, runs: list[RunSummary]) -> None:
    """Raise SettingsError for a key that is neither a column nor any run's setting."""
    if key in COLUMNS or not runs or any(key in run.settings for run in runs):
        return
    known = {*COLUMNS, *(name for run in runs for name in run.settings)}
    raise SettingsError(f"no run has '{key}'", choices.did_you_mean(key, sorted(known)))


def _get(run: RunSummary, key: str) -> Any:
    return getattr(run, key) if key in COLUMNS else run.settings.get(key)


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _format(run: RunSummary, key: str) -> str:
    """Return a value as a filter writes it: null, true and false as in JSON."""
    value = _get(run, key)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
