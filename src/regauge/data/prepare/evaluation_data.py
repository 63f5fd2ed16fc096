"""Prepares records for an evaluation like an earlier dataset: same rows, tokenizer and classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.config import build
from regauge.data.dataset import TOKENIZER_FOLDER, read_manifest
from regauge.data.prepare.prepare import PrepareJob, prepare_datasets
from regauge.data.settings import UNNAMED, RowLayout, SplitSettings, TokenizerSettings
from regauge.system.json_files import hash_document
from regauge.system.processes import available_cores
from regauge.system.units import MEGA

if TYPE_CHECKING:
    from regauge.data.sources import Source

TEMPLATE_KEYS = ("chat_template", "template_sha256")
"""Keys of `rows` replaced by the dataset's tokenizer: it contains the chat template."""
SMALL_SOURCE_BYTES = 16 * MEGA
"""Maximum size at which one process is faster than several."""


def prepare_like(dataset: Path, source: Source, folder: Path) -> Path:
    """Prepare all records in a source as held-out rows; return the new dataset's folder.

    It is a subfolder of `folder`, named after a hash of the inputs, so an unchanged source is
    prepared once. Raises DataError if most records are unusable.
    """
    manifest = read_manifest(dataset)
    settings = manifest.settings
    rows = {name: value for name, value in settings["rows"].items() if name not in TEMPLATE_KEYS}
    labels = {}
    for name in rows.get("labels", {}):
        column = manifest.columns[name]
        labels[name] = column.class_names or tuple(map(str, range(column.num_classes or 0)))
    rows |= {"labels": labels} if labels else {}
    split = SplitSettings(
        heldout_fraction=1.0, similarity=1.0, group_by=settings["split"].get("group_by")
    )
    job = PrepareJob(
        folder=folder,
        source=source,
        tokenizer=TokenizerSettings(path=str(dataset.resolve() / TOKENIZER_FOLDER)),
        layouts={UNNAMED: build(RowLayout, rows, source=str(dataset))},
        split=split,
    )
    inputs = job.collect_inputs()
    name = hash_document(inputs.to_document())[:12]
    is_small = sum(piece.bytes for piece in inputs.pieces) < SMALL_SOURCE_BYTES
    job = replace(job, folder=folder / name, processes=1 if is_small else available_cores())
    prepare_datasets(job)
    return job.folder
