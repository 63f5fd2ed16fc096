"""Compare runs: quality within a band or not, where they part, and what each cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import config, verbs
from regauge.comparison.settings import PAIR, Comparison
from regauge.config import Settings
from regauge.errors import DifferenceError, NotShownError, SettingsError
from regauge.reporting.settings import ReportSettings
from regauge.training.settings import Batch, Output, Training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.comparison.compare import Compared, Place

OUTPUT = "output.folder"
AGAIN = "-again"
"""Behind the name of a run's folder: of its repetition."""


class Compare(Settings):
    """Everything about a comparison."""

    output: Output | None = None
    """Folder for a report of the runs; none by default."""
    comparison: Comparison
    """The runs."""
    report: ReportSettings = ReportSettings()
    """How they are told."""


ROOT = Compare


def main(
    run_file: Annotated[
        Path, Parameter(help="the first run or its run file, or a run file with [comparison]")
    ],
    *overrides: Annotated[str, Parameter(help="the other runs, and key.path=value")],
    noise_floor: Annotated[
        bool, Parameter(help="repeat the first run in another order of its sums, and compare both")
    ] = False,
    localise: Annotated[
        bool, Parameter(help="compute the step again in which they part, and name the module")
    ] = False,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Compare runs with the first of them; run files are run before."""
    settings, files = read((str(run_file), *overrides))
    if dry_run:
        return verbs.show({**plan(settings), "run_before": list(files)}, as_json=json)
    for file in files:
        _train(verbs.load(Training, file, ()))
    if noise_floor:
        again = repeated(Path(settings.comparison.runs[0]))
        _train(again)
        told = (*settings.comparison.noise, again.output.folder)
        settings = settings.model_copy(
            update={"comparison": settings.comparison.model_copy(update={"noise": told})}
        )
    found = _compared(settings)
    if localise:
        found = replace(found, places=tuple(_places(found, settings)))
    answer = verbs.show(_answer(found, settings), as_json=json)
    _judge(found, settings.comparison)
    return answer


def read(what: tuple[str, ...]) -> tuple[Compare, tuple[Path, ...]]:
    """Return the settings of a command line, and the run files whose runs are compared."""
    paths = [Path(word) for word in what if "=" not in word or Path(word).exists()]
    overrides = tuple(word for word in what if "=" in word and not Path(word).exists())
    if len(paths) == 1 and paths[0].suffix in verbs.RUN_FILES:
        return verbs.load(Compare, paths[0], overrides), ()
    if len(paths) < PAIR:
        remedy = "name two runs or more: regauge compare out/a out/b"
        raise SettingsError("nothing to compare with", remedy)
    files = tuple(path for path in paths if path.suffix in verbs.RUN_FILES)
    folders = [
        verbs.load(Training, path, ()).output.folder if path in files else str(path)
        for path in paths
    ]
    tables = config.override({"comparison": {"runs": tuple(folders)}}, overrides)
    return config.build(Compare, tables, verbs.tables(), "the command line"), files


def plan(settings: Compare) -> dict[str, Any]:
    """Return what would be compared; runs that do not exist yet are named."""
    runs = settings.comparison.runs
    missing = [folder for folder in runs if not Path(folder).is_dir()]
    answer = {"first": runs[0], "compared": list(runs[1:]), "band": settings.comparison.band}
    return answer | ({"not_there_yet": missing} if missing else {})


def run(settings: Compare) -> dict[str, Any]:
    """Compare runs that are there; return the verdicts."""
    found = _compared(settings)
    answer = _answer(found, settings)
    _judge(found, settings.comparison)
    return answer


def repeated(folder: Path) -> Training:
    """Return the settings of a run again, in a folder beside it and with other microbatches.

    Their gradients are summed in another order, which is all that differs.
    """
    path = folder / "run.json"
    # Not `verbs.load`: this command's user did not write it, so what code it names is not run.
    settings = config.build(Training, config.read(path), verbs.tables(), str(path))
    found = [_otherwise(aim.batch) for aim in settings.task_configs]
    if not any(found):
        raise SettingsError(
            f"{folder} has a batch of one row, whose sums have one order",
            "name a repetition of it with comparison.noise",
        )
    changed: dict[str, Any] = {}
    if isinstance(settings.task, tuple):
        changed["task"] = tuple(
            each.model_copy(
                update={"batch": each.batch.model_copy(update={"microbatch_rows": size})}
            )
            if size
            else each
            for each, size in zip(settings.task, found, strict=True)
        )
    else:
        changed["batch"] = settings.batch.model_copy(update={"microbatch_rows": found[0]})
    place = folder.with_name(folder.name + AGAIN)
    output = settings.output.model_copy(update={"folder": str(place)})
    return settings.model_copy(update={**changed, "output": output})


def _otherwise(batch: Batch) -> int | None:
    """Return another size of microbatches of which a batch consists; None for a batch of one."""
    own = batch.microbatch
    return next((size for size in (own // 2, own * 2) if size and batch.rows % size == 0), None)


def _train(settings: Training) -> None:
    verbs.module("train").run(settings)


def _compared(settings: Compare) -> Compared:
    from regauge.comparison.compare import compared

    return compared(settings.comparison)


def _answer(found: Compared, settings: Compare) -> dict[str, Any]:
    """Return the verdicts and the costs; the report is written where a folder is named."""
    from regauge.comparison.sentences import cost_sentences, cost_table, sentences

    answer: dict[str, Any] = {
        each.theirs: {"verdict": each.verdict, "told": sentences(each)} for each in found.parities
    }
    for place in found.places:
        answer[f"{place.run} parts"] = place.named
        answer[f"{place.run} around it"] = place.values
    if found.target is not None:
        answer["cost"] = cost_sentences(found)
        answer["to_target"] = cost_table(found)
    if settings.output is not None:
        from regauge.reporting.page import tell
        from regauge.reporting.render import path_of, write

        path = path_of(settings.output.folder, settings.report)
        write(path, tell(found.runs, settings.report.title, found))
        answer["report"] = str(path)
    return answer


def _places(found: Compared, settings: Compare) -> Iterator[Place]:
    """Yield for each run that parts from the first where it does."""
    from regauge.comparison import first_divergence
    from regauge.comparison.compare import Place
    from regauge.verbs._localise import localise

    first, *others = found.runs
    folder = Path(settings.output.folder) if settings.output else first.folder
    float64 = settings.comparison.reference == "fp64"
    for parity, other in zip(found.parities, others, strict=True):
        if parity.parted is None or parity.prevented:
            continue
        place = folder / f"beside-{other.folder.name}"
        where = localise((first.folder, other.folder), parity, place, float64=float64)
        named = first_divergence.sentence(where)
        yield Place(other.name, named, first_divergence.table(where))


def _judge(found: Compared, comparison: Comparison) -> None:
    """Raise DifferenceError or NotShownError for the first run that does not pass."""
    from regauge.comparison.sentences import sentences, unreached, way_out

    for each in found.parities:
        line = sentences(each)[0].rstrip(".")
        if each.verdict == "not shown":
            raise NotShownError(line, way_out(each))
        if each.verdict == "fail" and comparison.on_difference == "fail":
            raise DifferenceError(line, way_out(each))
    if comparison.target is not None and (missed := unreached(found)):
        raise NotShownError(missed[0].rstrip("."), "train longer, or set a nearer target")
