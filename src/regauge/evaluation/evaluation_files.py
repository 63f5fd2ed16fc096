"""Files of an evaluation: table, samples, and inputs, whose changes call for another one.

This module does not import torch.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import __version__
from regauge.config import FORMAT, Tables, dump
from regauge.config.output_files import EVALUATION, INPUTS, SAMPLES
from regauge.data.dataset import read_manifest
from regauge.data.input_hashes import find_custom_code, stamp_files
from regauge.data.sources.beir import Beir
from regauge.inference.export.artifact import is_artifact
from regauge.inference.export.manifest import MANIFEST
from regauge.system import choices, jsonl
from regauge.system.files import sha256, write_json
from regauge.system.hub import final_model_dir
from regauge.system.json_files import find_valid_json, write_sealed
from regauge.system.processes import detect_world
from regauge.tasks._embeddings import EmbeddingTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.evaluation.settings import EvaluateSettings
    from regauge.tasks import ClassReport

OUTPUTS = (EVALUATION, SAMPLES)


def describe_inputs(settings: EvaluateSettings) -> Tables:
    """Return the inputs that determine an evaluation result.

    They are the settings, the dataset, and all other files' sizes and modification times.
    """
    source = settings.evaluate.source
    code = [path for item in (settings.task, source) if item for path in find_custom_code(item)]
    metrics = map(choices.load_function, settings.evaluation.metrics)
    code += [Path(inspect.getfile(metric)) for metric in metrics]
    document = {
        "format": FORMAT,
        "regauge": __version__,
        "settings": dump(settings),
        "dataset": read_manifest(Path(settings.data.path)).fingerprint,
        "models": {name: _stamp_model(Path(path)) for name, path in settings.models.items()},
        "source": [piece.stamp for piece in source.list_pieces()] if source else [],
        "code": stamp_files(code),
    }
    normalized: Tables = json.loads(json.dumps(document))
    return normalized


def find_collection(settings: EvaluateSettings) -> Beir | None:
    """Return the search benchmark whose corpus embedding models rank, if it is the source."""
    source = settings.evaluate.source
    has_vectors = isinstance(settings.task, EmbeddingTask)
    return source if isinstance(source, Beir) and has_vectors else None


def find_result(folder: Path, inputs: Tables) -> Tables | None:
    """Return the table from a finished evaluation with these inputs, or None to compute it.

    It must be computed if its files were changed or removed.
    """
    record = find_valid_json(folder / INPUTS) or {}
    if record.get("inputs") != inputs or record.get("outputs") != _hash_outputs(folder):
        return None
    return find_valid_json(folder / EVALUATION)


def write_table(
    settings: EvaluateSettings,
    rows: list[dict[str, Any]],
    *,
    note: str,
    data_fingerprint: str,
    num_rows: int,
    classes: Mapping[str, ClassReport] | None = None,
) -> Tables:
    """Write an evaluation table if this is the main process; return it.

    `note` describes the `num_rows` evaluated rows.
    """
    directions = {name: settings.task.find_direction(name) for row in rows for name in row}
    table: Tables = {
        "format": FORMAT,
        "title": settings.evaluate.title,
        "rows": rows,
        "directions": {name: direction for name, direction in directions.items() if direction},
        "classes": classes or {},
        "notes": [note],
        "settings": dump(settings),
        "identity": {"data_fingerprint": data_fingerprint, "heldout_rows": num_rows},
    }
    if detect_world().is_main_process:
        folder = Path(settings.output.folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(folder / EVALUATION, table)
    return table


def write_samples(settings: EvaluateSettings, samples: list[dict[str, Any]]) -> None:
    """Write completions of held-out prompts, if there are any and this is the main process."""
    if samples and detect_world().is_main_process:
        path = Path(settings.output.folder) / SAMPLES
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        for sample in samples:
            jsonl.append_line(path, sample)


def write_inputs(folder: Path, inputs: Tables) -> None:
    """Record a finished evaluation's inputs and file hashes."""
    write_json(folder / INPUTS, {"inputs": inputs, "outputs": _hash_outputs(folder)})


def _hash_outputs(folder: Path) -> dict[str, str]:
    return {name: sha256(folder / name) for name in OUTPUTS if (folder / name).is_file()}


def _stamp_model(path: Path) -> dict[str, list[int]]:
    """Return the file sizes and modification times of a model or an artifact."""
    if is_artifact(path):
        return stamp_files([path / MANIFEST])
    return stamp_files(final_model_dir(str(path)).rglob("*"))
