"""How fast artifacts answer: turns in processes of their own, in alternation, and one document.

The machine changes from minute to minute: every artifact has a turn before any of them has the
next. What each turn has seen stays in the folder.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.artifacts import artifact as artifacts
from regauge.artifacts.manifest import ARTIFACT, MANIFEST
from regauge.benchmarking import summary
from regauge.benchmarking.settings import BENCHMARK
from regauge.choices import did_you_mean
from regauge.config import dump
from regauge.errors import ChildError, NoProgressError, SettingsError, find_refusal
from regauge.log import logger
from regauge.planning.catalog import instance, rate
from regauge.reporting.benchmarks import read
from regauge.worker import WorkerLimits, run_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.artifacts.manifest import Manifest
    from regauge.benchmarking.settings import Measuring
    from regauge.worker import Line

TURNS = "turns"
DEFAULT = Path("out") / "benchmark"
"""Where the tables of artifacts go that are named without a run file."""
WORKER = "regauge.benchmarking.latency_worker"


def named(folders: Sequence[Path]) -> dict[str, str]:
    """Return folders by names: their own, with that of what they are in where two have the same.

    Raises SettingsError where two have both in common.
    """
    short = [
        each.resolve().parent.name if each.name == ARTIFACT else each.resolve().name
        for each in folders
    ]
    often = Counter(short)
    names = [
        name if often[name] == 1 else f"{each.resolve().parent.name}-{each.name}"
        for name, each in zip(short, folders, strict=True)
    ]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        remedy = f"name each: inference.artifacts.NAME={folders[names.index(twice)]}"
        raise SettingsError(f"two artifacts would be called '{twice}'", remedy)
    return {name: str(each) for name, each in zip(names, folders, strict=True)}


def plan(settings: Measuring) -> dict[str, Any]:
    """Return what would be measured; what cannot be is refused here, before anything is loaded.

    Why the output folder would be refused is part of the answer.
    """
    settings = _settled(settings)
    asked, arrivals = settings.inference, settings.arrivals
    found = _manifests(settings)
    folder = Path(settings.output.folder)
    refusal = find_refusal(lambda: _check_folder(settings))
    for name, manifest in found.items():
        _check_lengths(name, manifest, asked.lengths)
    earlier = {} if refusal else _earlier(settings)
    known = (*found, *(each["name"] for each in earlier.get("artifacts", ())))
    for name in {name for pair in asked.beside for name in pair}:
        if name not in known:
            problem = f"inference.beside: no artifact is called '{name}'"
            raise SettingsError(problem, did_you_mean(name, known))
    if settings.execution.price.instance is not None:
        instance(settings.execution.price.instance)
    price = rate(settings.execution.price)
    grid = [f"{rows} x {length}" for length, rows in product(asked.lengths, asked.rows)]
    each = asked.seconds + arrivals.seconds * len((*arrivals.shares, *arrivals.rates))
    return {
        "output": str(folder),
        "artifacts": [_told(name, manifest) for name, manifest in found.items()],
        "batch_x_length": grid,
        "requests_a_second": [
            *(f"{share:g} of the closed loop" for share in arrivals.shares),
            *(f"{per_second:g}" for per_second in arrivals.rates),
        ],
        "turns": asked.turns,
        "seconds_at_least": round(each * len(grid) * asked.turns * len(found)),
        "price": price.told if price else "unknown",
        **refusal,
    }


def run(settings: Measuring) -> dict[str, Any]:
    """Let every artifact have its turns; return what is written, see `figures.document`."""
    settings = _settled(settings)
    plan(settings)
    _check_folder(settings)
    asked, folder = settings.inference, Path(settings.output.folder)
    (folder / TURNS).mkdir(parents=True, exist_ok=True)
    price = rate(settings.execution.price)
    remark = price.remark(summary.today()) if price else None
    if remark:
        logger.warning("%s", remark)
    if (folder / BENCHMARK).exists() and not _earlier(settings):
        logger.warning("%s is of other requests, and is replaced", folder / BENCHMARK)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in asked.artifacts}
    for number, name in product(range(1, asked.turns + 1), asked.artifacts):
        found[name].append(_turn(settings, name, number))
    return summary.document(settings, _manifests(settings), found, _earlier(settings))


def _manifests(settings: Measuring) -> dict[str, Manifest]:
    """Return what each artifact says of itself, by its name."""
    every = settings.inference.artifacts.items()
    return {name: artifacts.read(Path(path)) for name, path in every}


def _settled(settings: Measuring) -> Measuring:
    """Return settings whose lengths, unless they were asked for, are such as all artifacts read."""
    asked = settings.inference
    if "lengths" in asked.model_fields_set:
        return settings
    longest = min(each.shapes[-1].length for each in _manifests(settings).values())
    lengths = tuple(dict.fromkeys(min(length, longest) for length in asked.lengths))
    inference = asked.model_copy(update={"lengths": lengths})
    return settings.model_copy(update={"inference": inference})


def _turn(settings: Measuring, name: str, number: int) -> list[dict[str, Any]]:
    """Return what an artifact's process wrote down in one turn.

    Raises ChildError for one that failed, NoProgressError for one that fell silent.
    """
    folder = Path(settings.output.folder) / TURNS / f"{number}-{name}"
    request = {"settings": dump(settings), "name": name, "number": number}
    patience = _patience(settings)
    lines: list[Line] = []
    ended = run_worker(
        WORKER,
        {**request, "began": time.monotonic()},
        folder,
        WorkerLimits(silence=patience),
        quiet=False,
        on_line=lines.append,
    )
    if ended.code is None:
        remedy = "raise inference.timeout_seconds, or export the artifact again"
        raise NoProgressError(f"{name} has said nothing for {patience:.0f} s", remedy)
    if code := ended.code:
        error = next((line["error"] for line in lines if "error" in line), None)
        line = error or f"its process {ended.problem}; see what it printed above"
        raise ChildError(code if code > 0 else 128 - code, f"{name}: {line}")
    return lines


def _patience(settings: Measuring) -> float:
    """Return how long an artifact may write nothing: it writes after each load."""
    longest = max(settings.inference.seconds, 2 * settings.arrivals.seconds)
    return settings.inference.timeout_seconds + longest


def _check_folder(settings: Measuring) -> None:
    """Raise SettingsError for an output folder that holds something else."""
    folder = Path(settings.output.folder)
    if (folder / MANIFEST).exists():
        raise SettingsError(f"{folder} is an artifact or a dataset", "set another output.folder")
    _earlier(settings)


def _earlier(settings: Measuring) -> dict[str, Any]:
    """Return what an earlier job measured in this folder, where its requests were the same.

    Raises SettingsError where the file is another one's, or cannot be read.
    """
    path = Path(settings.output.folder) / BENCHMARK
    found = read(path) if path.exists() else {}
    if found and found.get("measured") != "inference":
        raise SettingsError(f"{path} is of something else", "set another output.folder")
    return found if found.get("alike") == summary.alike(settings) else {}


def _check_lengths(name: str, manifest: Manifest, lengths: Sequence[int]) -> None:
    longest = manifest.shapes[-1].length
    if max(lengths) > longest:
        problem = f"{name} reads at most {longest} tokens, and inference.lengths has {max(lengths)}"
        raise SettingsError(problem, f"set inference.lengths = [{longest}]")


def _told(name: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "name": name,
        "model": summary.model_of(manifest),
        "computed_by": summary.computed_by(manifest),
        "made_on": manifest.target.chip,
    }
