"""Compare runs: quality within a band or not, where they part, and what each cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import Field

from regauge import config, verbs
from regauge.config import Settings
from regauge.errors import DifferenceError, NotShownError, SettingsError
from regauge.training.settings import Output, Training

if TYPE_CHECKING:
    from regauge.reporting.parity import Parity

OUTPUT = "output.folder"
PAIR = 2
RUN_FILES = (".toml", ".json")
AGAIN = "-again"
"""Behind the name of a run's folder: of its repetition."""


class Comparison(Settings):
    """Which runs are compared, and how much they may differ."""

    runs: tuple[str, ...] = Field(min_length=PAIR)
    """Output folders; each is compared with the first."""
    band: float = Field(default=0.001, gt=0)
    """Largest relative difference of a held-out metric that counts as none."""
    noise: tuple[str, ...] = ()
    """Output folders of repetitions of the first run, in another order of its sums."""
    on_difference: Literal["fail", "say"] = "fail"
    """Whether a difference ends the command with code 68."""


class Compare(Settings):
    """Everything about a comparison."""

    output: Output | None = None
    """Folder for a report of the runs; none by default."""
    comparison: Comparison
    """The runs."""


ROOT = Compare


def main(
    *what: Annotated[str, Parameter(help="runs or run files, the first one first; key.path=value")],
    noise_floor: Annotated[
        bool, Parameter(help="repeat the first run in another order of its sums, and compare both")
    ] = False,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Compare runs with the first of them; run files are run before."""
    settings, files = read(what)
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
    found = parities(settings)
    answer = verbs.show(_answer(found), as_json=json)
    _judge(found, settings.comparison)
    return answer


def read(what: tuple[str, ...]) -> tuple[Compare, tuple[Path, ...]]:
    """Return the settings of a command line, and the run files whose runs are compared."""
    paths = [Path(word) for word in what if "=" not in word or Path(word).exists()]
    overrides = tuple(word for word in what if "=" in word and not Path(word).exists())
    if len(paths) == 1 and paths[0].suffix in RUN_FILES:
        return verbs.load(Compare, paths[0], overrides), ()
    if len(paths) < PAIR:
        remedy = "name two runs or more: regauge compare out/a out/b"
        raise SettingsError("nothing to compare with", remedy)
    files = tuple(path for path in paths if path.suffix in RUN_FILES)
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
    found = parities(settings)
    _judge(found, settings.comparison)
    return _answer(found)


def parities(settings: Compare) -> list[Parity]:
    """Return what each run shows beside the first."""
    from regauge.reporting.parity import compare
    from regauge.reporting.runs import read as read_run

    first, *others = (read_run(Path(folder)) for folder in settings.comparison.runs)
    noise = [read_run(Path(folder)) for folder in settings.comparison.noise]
    return [compare(first, other, noise, settings.comparison.band) for other in others]


def repeated(folder: Path) -> Training:
    """Return the settings of a run again, in a folder beside it and with other microbatches.

    Their gradients are summed in another order, which is all that differs.
    """
    settings = verbs.load(Training, folder / "run.json", ())
    rows, own = settings.batch.rows, settings.batch.microbatch_rows
    other = next((size for size in (own // 2, own * 2) if size and rows % size == 0), None)
    if other is None:
        raise SettingsError(
            f"{folder} has a batch of one row, whose sums have one order",
            "name a repetition of it with comparison.noise",
        )
    batch = settings.batch.model_copy(update={"microbatch_rows": other})
    place = folder.with_name(folder.name + AGAIN)
    output = settings.output.model_copy(update={"folder": str(place)})
    return settings.model_copy(update={"batch": batch, "output": output})


def _train(settings: Training) -> None:
    from regauge.verbs import train

    train.run(settings)


def _answer(found: list[Parity]) -> dict[str, Any]:
    from regauge.reporting.verdicts import sentences

    return {
        each.theirs: {"verdict": each.verdict, "told": " ".join(sentences(each))} for each in found
    }


def _judge(found: list[Parity], comparison: Comparison) -> None:
    """Raise DifferenceError or NotShownError for the first run that does not pass."""
    from regauge.reporting.verdicts import sentences

    for each in found:
        line = sentences(each)[0].rstrip(".")
        if each.verdict == "not shown":
            raise NotShownError(line, "start both from one run file, and change how it computes")
        if each.verdict == "fail" and comparison.on_difference == "fail":
            remedy = (
                "see where they part" if each.measured else "add --noise-floor to know its noise"
            )
            raise DifferenceError(line, remedy)
