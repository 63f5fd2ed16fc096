"""Build the program of a custom module that a run trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from regauge.artifacts.programs import ProgramSpec, build_text_program, resolve_tokenization
from regauge.errors import DataError, first_line
from regauge.models.inference_modules import MIN_TRACE_ROWS, example_inputs
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.io_spec import program_inputs
from regauge.models.settings import Model

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.artifacts.export_settings import TextSettings
    from regauge.data.dataset import DatasetManifest
    from regauge.models.sentence_transformers import HeadActivation
    from regauge.tasks import Task


def build_custom_spec(
    folder: Path, task: Task, manifest: DatasetManifest, settings: TextSettings
) -> ProgramSpec:
    """Return the program of a custom module that a run has trained.

    The task builds the module, and says which output it has and which fields it reads. Raises
    DataError if the module does not return that output for texts.
    """
    model, input_spec = Model(path=str(folder)), task.input_spec(manifest)
    with META:
        module = task.build_module(model, manifest, seed=0)
    materialize(module, build_initial_weights(module, model, seed=0))
    tokenization = resolve_tokenization(folder, None, settings, module.max_tokens, input_spec)
    kind = task.output_kind()
    output: Literal["vectors", "scores"] = "vectors" if kind == "vectors" else "scores"
    program, inputs = build_text_program(module, output, tokenization), program_inputs(input_spec)
    examples = example_inputs(inputs, MIN_TRACE_ROWS, tokenization.max_length)
    try:
        with torch.no_grad():
            width = program(*examples).shape[1]
    except Exception as error:
        name = f"the module of task '{task.kind}'"
        raise DataError(
            f"{name} returns no '{output}' for texts: {type(error).__name__}: {first_line(error)}",
            f'return {{"{output}": [rows, width]}} from tokens, segments and positions',
        ) from error
    labels = tuple(getattr(task, "class_names", ()))
    activation: HeadActivation | None = None
    if kind != "vectors":
        activation = "softmax" if width > 1 else "identity"
    return ProgramSpec(
        program,
        kind,
        width,
        inputs,
        tokenization,
        input_spec,
        labels=labels,
        activation=activation,
        task=task,
    )
