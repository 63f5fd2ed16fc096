"""Builds the programs whose modules come from a run's task: rankers and custom modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from regauge import config
from regauge.data.dataset import read_manifest_file
from regauge.data.tokenizer import read_truncation_side
from regauge.inference.export.manifest import DATASET_FILE
from regauge.inference.export.programs import (
    build_text_program,
    build_text_spec,
    resolve_tokenization,
)
from regauge.models.inference_modules import MIN_TRACE_ROWS, RankProgram, example_inputs
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.io_spec import program_inputs
from regauge.models.sentence_transformers import Tokenization
from regauge.models.settings import Model
from regauge.system.errors import DataError, SettingsError, first_line

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.dataset import DatasetManifest
    from regauge.inference.export.export_settings import TextSettings
    from regauge.inference.export.programs import ProgramSpec
    from regauge.models.modules import TextModule
    from regauge.models.sentence_transformers import HeadActivation
    from regauge.tasks import Task


def build_ranker_spec(folder: Path, task: Task, manifest: DatasetManifest) -> ProgramSpec:
    """Return a ranker's program: a candidate's score for a query.

    Raises SettingsError if the ranker does not read text.
    """
    input_spec = task.input_spec(manifest)
    if not input_spec.text_fields:
        problem = f"the ranker of {folder} does not read text"
        raise SettingsError(problem, "export a ranker with text fields")
    ranker: Any = _load_module(folder, task, manifest).eval()
    ranker.shape = ranker.shape._replace(candidates=1)
    tokenization = Tokenization(
        max_length=max(input_spec.max_lengths),
        truncation_side=read_truncation_side(folder),
        special_tokens="read",
    )
    return build_text_spec(RankProgram(ranker), "scores", 1, tokenization, input_spec)


def build_custom_spec(
    folder: Path, task: Task, manifest: DatasetManifest, settings: TextSettings
) -> ProgramSpec:
    """Return the program of a custom module trained by a run.

    The task builds the module, and says which output it has and which fields it reads. Raises
    DataError if the module does not return this output for texts.
    """
    module, input_spec = _load_module(folder, task, manifest), task.input_spec(manifest)
    tokenization = resolve_tokenization(folder, None, settings, module.max_tokens, input_spec)
    kind = task.output_kind()
    output: Literal["vectors", "scores"] = "vectors" if kind == "vectors" else "scores"
    program = build_text_program(module, output, tokenization)
    examples = example_inputs(program_inputs(input_spec), MIN_TRACE_ROWS, tokenization.max_length)
    try:
        with torch.no_grad():
            width = program(*examples).shape[1]
    except Exception as error:
        problem = f"the module of task '{task.kind}' does not return '{output}' for texts"
        raise DataError(
            f"{problem}: {type(error).__name__}: {first_line(error)}",
            f'return {{"{output}": [rows, width]}} from tokens, segments and positions',
        ) from error
    activation: HeadActivation | None = None
    if kind != "vectors":
        activation = "softmax" if width > 1 else "identity"
    return build_text_spec(
        program,
        kind,
        width,
        tokenization,
        input_spec,
        labels=tuple(getattr(task, "class_names", ())),
        activation=activation,
        task=config.dump(task),
    )


def _load_module(folder: Path, task: Task, manifest: DatasetManifest) -> TextModule:
    module = _build_on_meta(folder, task, manifest)
    materialize(module, build_initial_weights(module, Model(path=str(folder)), seed=0))
    return module


def _build_on_meta(folder: Path, task: Task, manifest: DatasetManifest) -> TextModule:
    with META:
        return task.build_module(Model(path=str(folder)), manifest, seed=0)


def build_trained_module(table: dict[str, Any], folder: Path) -> TextModule:
    """Return a trained custom module without weights; imports the task if allowed."""
    task: Task = config.parse_choice("tasks", table)
    return _build_on_meta(folder, task, read_manifest_file(folder / DATASET_FILE))
