"""Build the program of a ranker that a run trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.artifacts.programs import ProgramSpec
from regauge.data.tokenizer import read_truncation_side
from regauge.errors import SettingsError
from regauge.models.inference_modules import RankProgram
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.io_spec import program_inputs
from regauge.models.sentence_transformers import Tokenization
from regauge.models.settings import Model

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.dataset import DatasetManifest
    from regauge.tasks import Task


def build_ranker_spec(folder: Path, task: Task, manifest: DatasetManifest) -> ProgramSpec:
    """Return the program of a ranker: the score of one candidate for a query.

    Raises SettingsError if the ranker reads no text.
    """
    input_spec = task.input_spec(manifest)
    if not input_spec.text_fields:
        problem = f"the ranker of {folder} reads no text"
        raise SettingsError(problem, "export a ranker with text fields")
    settings = Model(path=str(folder))
    with META:
        module = task.build_module(settings, manifest, seed=0)
    materialize(module, build_initial_weights(module, settings, seed=0))
    ranker: Any = module.eval()
    ranker.shape = ranker.shape._replace(candidates=1)
    tokenization = Tokenization(
        max_length=max(input_spec.max_lengths),
        truncation_side=read_truncation_side(folder),
        special_tokens="read",
    )
    inputs = program_inputs(input_spec)
    return ProgramSpec(RankProgram(ranker), "scores", 1, inputs, tokenization, input_spec)
