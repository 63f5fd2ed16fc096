"""Run batch inference over files and write embeddings, classes or scores.

For example:

    $ regauge predict out/artifact --source 'items/*.jsonl' --to out/vectors
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands, config
from regauge.data.sources._suffixes import build_source_table
from regauge.inference.export.artifact import is_artifact, read_manifest
from regauge.inference.predict.settings import PredictSettings
from regauge.monitoring.notify.sinks import build_sinks
from regauge.registry.model_reference import locate_model, parse_reference
from regauge.system.errors import SettingsError, find_refusal

OUTPUT = "output.folder"
ROOT = PredictSettings


def main(
    run_file: Annotated[
        Path | None,
        Parameter(help="Run file; or model or REGISTRY/NAME@STAGE with --source and --to."),
    ] = None,
    *overrides: commands.Override,
    source: Annotated[str | None, Parameter(help="Input files, such as 'items/*.jsonl'.")] = None,
    to: Annotated[Path | None, Parameter(help="Output folder.")] = None,
    max_usd: Annotated[
        float | None, Parameter(help="Stop when the cost reaches this many dollars.")
    ] = None,
    index: Annotated[
        int | None, Parameter(help="Index of this job among several jobs with the same work.")
    ] = None,
    count: Annotated[
        int | Literal["auto"] | None,
        Parameter(help="Number of jobs sharing the work; auto: the Slurm array's."),
    ] = None,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Run a model on every record in a source; the same command resumes a stopped job.

    For example:

        >>> regauge.predict("out/artifact", source="items/*.jsonl", to="out/vectors")
    """
    flags = [
        ("output.folder", to),
        ("predict.max_usd", max_usd),
        ("predict.job_index", index),
        ("predict.job_count", count),
    ]
    assignments = tuple(f"{key}={value}" for key, value in flags if value is not None)
    settings = _load_settings(run_file, source, (*overrides, *assignments))
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    return commands.show(run(settings), as_json=json)


def _load_settings(
    run_file: Path | None, source: str | None, overrides: tuple[str, ...]
) -> PredictSettings:
    if run_file is None:
        raise SettingsError("no model to run", "name a run file, or the folder of a model")
    reference = parse_reference(run_file)
    if reference is None and not run_file.exists():
        raise SettingsError(f"{run_file} does not exist", "name a model's folder or a run file")
    is_artifact = reference is not None or run_file.is_dir()
    model = str(reference or run_file)
    tables: config.Tables = {"artifact": model} if is_artifact else config.read(run_file)
    if source is not None:
        tables["source"] = build_source_table(source)
    tables = config.apply_overrides(tables, overrides, ROOT)
    if is_artifact:
        for key, flag in (("source", "--source"), ("output", "--to")):
            if key not in tables:
                raise SettingsError(f"no {key} is named", f"add {flag}")
    tables = commands.allow_user_code(run_file, tables)
    return config.build(PredictSettings, tables, commands.table_names(), str(run_file))


def plan(settings: PredictSettings) -> dict[str, Any]:
    """Return a job's planned work, without contacting other machines."""
    from regauge.inference.export.uncompiled import open_model
    from regauge.inference.predict.predict import check_output_folder, plan_predict

    address = settings.source.remote_location()
    work = None if address else plan_predict(settings)
    artifact = work.artifact if work else open_model(settings.artifact, keep_weights=False)
    manifest = artifact.manifest
    answer = {
        "output": settings.output.folder,
        "artifact": settings.artifact,
        "backend": f"{manifest.compiled.backend.kind} {manifest.compiled.precision}",
        "output_kind": manifest.program.output_kind,
    }
    if work is None:
        return {**answer, "source": f"{address} (not read in a dry run)"}
    job = work.job
    refusal = find_refusal(lambda: check_output_folder(work))
    return {
        **answer,
        "text_fields": list(work.worker_spec.inputs.text_fields),
        "keep_fields": list(work.worker_spec.kept_fields),
        "pieces": len(job.piece_numbers),
        "bytes": sum(job.pieces[number].bytes for number in job.piece_numbers),
        "job": f"{job.slot.index} of {job.slot.count}",
        "finished_shards": 0 if refusal else len(job.read_finished_shards()),
        **(refusal or find_refusal(lambda: build_sinks(settings.monitoring.notifications))),
    }


def run(settings: PredictSettings) -> dict[str, Any]:
    """Run the job's remaining shards; return counts and costs, and perhaps `next`."""
    from regauge.inference.predict.predict import predict

    return {**predict(settings), **_suggest_search(settings)}


def _suggest_search(settings: PredictSettings) -> dict[str, str]:
    folder = Path(locate_model(settings.artifact))
    if settings.output.format != "parquet" or not is_artifact(folder):
        return {}
    if read_manifest(folder).program.output_kind != "vectors":
        return {}
    override = f"serve.search.vectors={settings.output.folder}"
    return {"next": shlex.join(("regauge", "serve", settings.artifact, override))}
