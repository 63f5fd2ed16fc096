"""Base class for tasks that train a text encoder, which outputs vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from regauge.models import sentence_transformers
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.log import logger
from regauge.tasks._fields import TEXT_TOKENS, FieldsTask

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.dataset import DatasetManifest
    from regauge.models.architectures import HeadKind
    from regauge.models.modules import Encoder
    from regauge.models.settings import Model

QUERY, DOCUMENT = "query", "document"
"""Prompt names, as in sentence-transformers."""


class EmbeddingTask(FieldsTask):
    """Train text vectors; a row's texts are encoded independently.

    If `needs_global_batch`, `vectors` are those of text number 0 in all rows, then text number 1,
    and so on, each [rows, width].
    """

    needs_global_batch: ClassVar[bool] = True
    metrics_need_all_rows: ClassVar[bool] = True
    exports_prompts: ClassVar[bool] = True

    pooling: tuple[sentence_transformers.PoolingMode, ...] = ()
    """Pooling over the last hidden states; by default as in the weights folder, or the mean."""
    prompts: dict[str, str] = {}
    """Text prompts, which `rows.prompts` prepends; by default as in the dataset. The exported
    folder names them."""

    @property
    def head(self) -> HeadKind:
        return "none"

    def prompt_columns(self) -> dict[str, tuple[str, ...]]:
        """Prompt name -> fields with this prompt."""
        return {name: (name,) for name in self.text_columns()}

    def normalizes_vectors(self) -> bool:
        """Return whether the trained model's vectors have length 1."""
        return True

    @model_validator(mode="after")
    def _check_text_columns(self) -> EmbeddingTask:
        names = self.text_columns()[1:]  # the first text may be equal to another (SimCSE)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the field '{name}' is listed twice; remove one")
        for name in self.prompts:
            if name not in self.prompt_columns():
                remedy = did_you_mean(name, tuple(self.prompt_columns()))
                raise ValueError(f"the task has no prompt '{name}'; {remedy}")
        return self

    def default_rows(self) -> dict[str, Any]:
        columns = self.prompt_columns()
        prompts = {
            name: prompt
            for prompt_name, prompt in self.prompts.items()
            for name in columns[prompt_name]
        }
        fields = dict.fromkeys(self.text_columns(), TEXT_TOKENS)
        return {**super().default_rows(), "fields": fields, "prompts": prompts}

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        for prompt_name, columns in self.prompt_columns().items():
            expected = self.prompts.get(prompt_name, manifest.columns[columns[0]].prompt)
            for name in columns:
                if (prompt := manifest.columns[name].prompt) != expected:
                    problem = f"the texts of '{name}' have the prompt '{prompt}', not '{expected}'"
                    remedy = f'prepare them with rows.prompts = {{ {name} = "{expected}" }}'
                    raise SettingsError(problem, remedy)

    def check_weights(self, folder: Path) -> None:
        encoder = sentence_transformers.read_if_present(folder)
        if encoder and encoder.pooling.dense:
            logger.warning("%s: the dense layers after the pooling are not trained", folder)
        prompts = encoder.tokenization.prompts if encoder else {}
        if names := [name for name in prompts if prompts[name] and name not in self.prompts]:
            logger.warning(
                "%s: training adds no prompts to the texts: %s; set them with task.prompts,"
                " unless rows.prompts adds them",
                folder,
                ", ".join(names),
            )

    def slots_per_row(self) -> int:
        return len(self.text_columns())

    def export_prompts(self, manifest: DatasetManifest) -> dict[str, str]:
        prompts = {
            name: manifest.columns[columns[0]].prompt
            for name, columns in self.prompt_columns().items()
        }
        return prompts if any(prompts.values()) else {}

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> Encoder:
        from regauge.models.modules import Encoder
        from regauge.system.hub import resolve_model

        folder = resolve_model(model.path) if model.path else None
        saved = sentence_transformers.read_if_present(folder) if folder else None
        default = saved.pooling if saved else sentence_transformers.Pooling()
        pooling = sentence_transformers.Pooling(
            modes=self.pooling or default.modes, normalize=self.normalizes_vectors()
        )
        return Encoder(*self.build_model(model, manifest, seed), pooling)


def measure_vectors(module: Encoder) -> int:
    size: int = module.model.config.hidden_size * len(module.pooling.modes)
    return size
