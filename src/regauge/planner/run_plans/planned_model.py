"""A planned run's model: its shape, and its weights with the task's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.models import weight_shapes
from regauge.models.default_sizes import DEFAULT_SIZES
from regauge.models.io_spec import ModelHead
from regauge.planner.model_shape import shape_from_config
from regauge.planner.other_shapes import find_obstacle
from regauge.system.errors import DataError, SettingsError
from regauge.system.hub import CONFIG, resolve_model
from regauge.system.json_files import read_json
from regauge.training.state_bytes import RunWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.data.dataset import DatasetManifest
    from regauge.models.architectures import HeadKind
    from regauge.models.settings import Model
    from regauge.planner.model_shape import Head, ModelShape
    from regauge.planner.run_plans.run_request import PlannedRun

HEADS: dict[HeadKind, Head] = {"masked": "masked-lm", "pairs": "masked-lm", "causal": "lm"}
"""Output layers over the vocabulary; other heads compute vectors or classes."""


class PlannedModel(NamedTuple):
    """A run's model, with its task's layers."""

    shape: ModelShape
    head: Head
    weights: RunWeights

    @property
    def trained_fraction(self) -> float:
        """Trained parameters, including LoRA adapters, as a share of those without adapters."""
        return min(self.weights.num_trained / self.shape.parameters(self.head), 1.0)


def read_model(run: PlannedRun, manifest: DatasetManifest, vocab_size: int | None) -> PlannedModel:
    """Return a run file's model.

    Sizes left out in the run file have transformers' defaults. Raises SettingsError for an
    architecture that the planner does not know, and if the vocabulary is unknown.
    """
    values = _read_config(run.model, vocab_size)
    if (obstacle := find_obstacle(str(values.get("model_type")))) is not None:
        raise SettingsError(obstacle, "plan its inference: regauge plan FOLDER --predict 1000000")
    try:
        shape = shape_from_config(values)
        if _is_untied(run.model, values):
            values = {**values, weight_shapes.TIED: False}
            shape = shape_from_config(values)
    except DataError as error:
        raise SettingsError(error.problem, error.remedy) from None
    head = HEADS.get(run.task.head, "none")
    model_head = run.task.find_head(manifest) or ModelHead(run.task.head)
    listed = weight_shapes.list_weights(values, model_head)
    encoder = weight_shapes.count_elements(listed.shapes)
    others = run.task.count_other_parameters(shape.hidden, encoder)
    specs = weight_shapes.list_trained(listed, run.model, model_head.kind)
    if others:
        specs["others"] = weight_shapes.ParamSpec((others,), requires_grad=True)
    shape = replace(shape, other_parameters=encoder + others - shape.parameters(head))
    return PlannedModel(shape, head, RunWeights(specs, run.optimizer.kind))


def _is_untied(model: Model, values: Mapping[str, Any]) -> bool:
    """Return whether the loader unties weights that config.json ties."""
    if model.path is None or model.weights == "random":
        return False
    return weight_shapes.stores_untied_layers(resolve_model(model.path, fetch=False), values)


def _read_config(model: Model, vocab_size: int | None) -> Mapping[str, Any]:
    """Return a model's config.json; raises SettingsError if the vocabulary is unknown."""
    if model.path is not None:
        folder = resolve_model(model.path, fetch=False)
        return read_json(folder / CONFIG, "copy the folder again")
    architecture = model.architecture or ""
    vocabulary = {} if vocab_size is None else {"vocab_size": vocab_size}
    if "vocab_size" not in vocabulary | model.config:
        problem = "the model's vocabulary is unknown until the data is prepared"
        raise SettingsError(problem, "set model.config.vocab_size")
    sizes = DEFAULT_SIZES.get(architecture, {})
    return {"model_type": architecture, **sizes, **vocabulary, **model.config}
