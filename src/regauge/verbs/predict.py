"""Answer every record of some files: embeddings, classes, scores or values, in files again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import config, verbs
from regauge.errors import SettingsError, find_refusal
from regauge.prediction.settings import Predicting

OUTPUT = "output.folder"
ROOT = Predicting
FORMS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
"""Which source reads files with such an ending."""
PACKED = {".gz", ".zst"}
WILD = set("*?[")
"""What stands for several endings, as in 'items/*.jsonl.*'."""


def main(
    run_file: Annotated[
        Path | None, Parameter(help="a run file, or an artifact's folder with --source and --to")
    ] = None,
    *overrides: verbs.Override,
    source: Annotated[str | None, Parameter(help="files, such as 'items/*.jsonl'")] = None,
    to: Annotated[Path | None, Parameter(help="folder of the answers")] = None,
    max_usd: Annotated[float | None, Parameter(help="dollars at which to stop")] = None,
    index: Annotated[int | None, Parameter(help="which of several equal jobs this is")] = None,
    count: Annotated[int | None, Parameter(help="how many equal jobs there are")] = None,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Answer every record of a source; a command that is given again goes on where it was."""
    flags = [
        ("output.folder", to),
        ("predict.max_usd", max_usd),
        ("predict.index", index),
        ("predict.count", count),
    ]
    given = tuple(f"{key}={value}" for key, value in flags if value is not None)
    settings = _settings(run_file, source, (*overrides, *given))
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def _settings(run_file: Path | None, source: str | None, assigned: tuple[str, ...]) -> Predicting:
    """Return the settings of a run file, or of an artifact and what is assigned."""
    if run_file is None:
        raise SettingsError("nothing says what answers", "name a run file, or an artifact's folder")
    if not run_file.exists():
        raise SettingsError(f"there is no {run_file}", "name an artifact's folder, or a run file")
    alone = run_file.is_dir()
    tables: config.Tables = {"artifact": str(run_file)} if alone else config.read(run_file)
    if source is not None:
        tables["source"] = _source(source)
    tables = config.override(tables, assigned)
    if alone:
        for key, remedy in (("source", "--source"), ("output", "--to")):
            if key not in tables:
                raise SettingsError(f"no {key} is named", f"add {remedy}")
    tables = verbs.own(run_file, tables)
    return config.build(Predicting, tables, verbs.tables(), str(run_file))


def _source(files: str) -> dict[str, Any]:
    """Return the table of a source of files; which kind it is their ending says."""
    suffixes = Path(files).suffixes
    endings = [each for each in suffixes if each not in PACKED and not WILD & set(each)]
    kind = FORMS.get(endings[-1]) if endings else None
    if kind is None:
        problem = f"'{files}' does not end in what says how to read it"
        raise SettingsError(problem, f"known: {', '.join(FORMS)}; or write a table source")
    lines = {"document": "line"} if kind == "text" else {}
    return {"kind": kind, "files": (files,), **lines}


def plan(settings: Predicting) -> dict[str, Any]:
    """Return what would be read, answered and written; nobody outside of this machine is asked."""
    from regauge.artifacts import artifact as artifacts
    from regauge.prediction.predict import check_answers, planned

    address = settings.source.elsewhere()
    work = None if address else planned(settings)
    manifest = (work.artifact if work else artifacts.opened(settings.artifact)).manifest
    answer = {
        "output": settings.output.folder,
        "artifact": settings.artifact,
        "backend": f"{manifest.compiled.backend.kind} {manifest.compiled.precision}",
        "answers": manifest.program.answers,
    }
    if work is None:
        return {**answer, "source": f"{address}, which the job asks for"}
    job = work.job
    refusal = find_refusal(lambda: check_answers(work))
    return {
        **answer,
        "texts": list(work.order.texts),
        "kept": list(work.order.kept),
        "pieces": len(job.share),
        "bytes": sum(job.pieces[number].bytes for number in job.share),
        "job": f"{job.place.index} of {job.place.count}",
        "shards_done": 0 if refusal else len(job.finished()),
        **refusal,
    }


def run(settings: Predicting) -> dict[str, Any]:
    """Answer what is not answered yet; return what was counted, and what it cost."""
    from regauge.prediction.predict import predict

    return predict(settings)
