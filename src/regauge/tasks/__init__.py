"""Training tasks: which batches a model reads, its loss, and its held-out metrics.

`Task` is the interface; each public file here is one task. `_tokens` and `_fields` build batches
from token rows and record fields. `_objectives` contains ranking losses; `_quality`, `_entities`
and `_retrieval` contain metrics.

A task is a frozen settings class. It may import `data` and `models`; torch only inside methods, so
run files are checked without it.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, Self

from typing_extensions import TypedDict  # readers validate it, and need this one on Python 3.11

from regauge.config import Choice
from regauge.data.buckets import TokenCounts
from regauge.models.io_spec import ModelHead
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.system.processes import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.buckets import BatchForm
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.data.settings import DataSettings
    from regauge.models.architectures import HeadKind
    from regauge.models.dropout import DropoutKeys
    from regauge.models.io_spec import InputSpec, OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model

MetricSums = dict[str, tuple[Any, Any]]
"""Metric name -> (weighted sum, weight); the mean is taken once, over all rows."""
MAX_SAMPLED_STEPS, MAX_SAMPLED_ROWS = 32, 1 << 13
"""Most steps, and about how many rows, whose tokens are counted before a run."""
ITEMS = "items"
"""Metric name for the number of items (rows, tokens or queries) averaged over."""

TEXT_HASHES = "text_hashes"
"""Name of the array that identifies texts: equal texts in a batch have equal hashes."""
PAIR_LABELS = "pair_labels"
"""Name of the array with row labels per text, [batch, 1] fp32."""
GATHERED_COLUMNS = (TEXT_HASHES, PAIR_LABELS)
"""Arrays that a loss over the global batch may need besides the vectors, [batch, width] fp32."""

Direction = Literal["min", "max"]
"""Whether a metric's best value is the lowest or the highest."""


class ClassMetrics(TypedDict):
    """Metrics for one class."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    """Items in the class."""


class ClassReport(TypedDict):
    """Model quality by class."""

    classes: list[ClassMetrics]
    confusion_matrix: NotRequired[list[list[int]]]
    """Row counts, [actual class, predicted class]; missing if there are too many classes."""


class Task(Choice):
    """A training objective with batches, model head and metrics."""

    needs_global_batch: ClassVar[bool] = False
    """Whether the loss needs the model outputs for the whole global batch at once."""
    metrics_need_all_rows: ClassVar[bool] = False
    """Whether the metrics need `eval_outputs` for all held-out rows at once."""
    has_classes: ClassVar[bool] = False
    """Whether `class_report` returns per-class metrics."""
    layout: ClassVar[str] = "packed"
    """Default row layout: a name in `data/layouts`."""
    module_needs_fields: ClassVar[bool] = False
    """Whether the module depends on the dataset's fields."""
    artifacts_have_metrics: ClassVar[bool] = True
    """Whether an artifact's outputs suffice to compute the held-out metrics."""
    generative: ClassVar[bool] = False
    """Whether the model predicts next tokens and can generate text."""
    has_marked_prompts: ClassVar[bool] = False
    """Whether rows mark prompts for generation; otherwise prompts may begin inside a word."""
    has_special_tokens: ClassVar[bool] = False
    """Whether texts for the trained model may have special tokens, such as the mask."""
    reference_columns: ClassVar[tuple[str, ...]] = ()
    """Row columns computed with the weights of step 0; most tasks have none."""
    minimized: ClassVar[tuple[str, ...]] = ("loss",)
    """Metrics whose best value is the lowest."""
    maximized: ClassVar[tuple[str, ...]] = ()
    """Metrics whose best value is the highest, without suffixes such as `@10`."""

    @classmethod
    def find_direction(cls, metric: str) -> Direction | None:
        """Return a metric's direction, or None if the task does not declare it."""
        name = re.split("@|_dim", metric.rpartition("/")[2])[0]
        return "min" if name in cls.minimized else "max" if name in cls.maximized else None

    @property
    def head(self) -> HeadKind:
        """Head added to a transformers model; plans count its weights."""
        problem = f"the task '{self.kind}' does not declare its head"
        raise SettingsError(problem, f"define the property head in {type(self).__name__}")

    def text_columns(self) -> tuple[str, ...]:
        """Return the token columns read by the model."""
        problem = f"the task '{self.kind}' does not declare the columns that it reads"
        raise SettingsError(problem, f"define text_columns in {type(self).__name__}")

    def count_other_parameters(self, width: int, encoder: int) -> int:
        """Count the parameters outside the transformers model and its head.

        `width` is the hidden width, and `encoder` the number of parameters without a head.
        """
        del width, encoder
        return 0

    def resolve_defaults(self, manifest: DatasetManifest) -> Self:
        """Fill settings left open in the run file from the dataset."""
        del manifest
        return self

    def find_assumption(self, manifest: DatasetManifest) -> str | None:
        """Return what the module assumes about a dataset that is not prepared, or None.

        The manifest has the columns in `[rows]`, or no columns.
        """
        del manifest
        return None

    def check_dataset(self, manifest: DatasetManifest) -> None:
        """Raise SettingsError or DataError if the task cannot use a dataset."""
        if manifest.layout != self.row_layout():
            raise SettingsError(
                f"task '{self.kind}' needs rows of layout '{self.row_layout()}', but the dataset"
                f" has '{manifest.layout}'",
                f'prepare it with rows.layout = "{self.row_layout()}"',
            )

    def default_rows(self) -> dict[str, Any]:
        """Return the `rows` table used by `prepare` if a run file has none."""
        return {"layout": self.row_layout()}

    def row_layout(self) -> str:
        """Return the row layout required by these settings."""
        return self.layout

    def check_weights(self, folder: Path) -> None:
        """Warn about parts of a weights folder that the task does not use."""

    def check_global_batch(self, num_rows: int) -> None:
        """Raise SettingsError if the task cannot use a global batch with this many rows."""

    def bucket_lengths(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the lengths in tokens to which batches are padded, ascending."""
        return (manifest.columns["tokens"].max_length,)

    @property
    def packs_texts(self) -> bool:
        """Whether texts are packed into rows if batches may have any shape."""
        return False

    def sample_tokens(
        self,
        data: DataSettings,
        manifest: DatasetManifest,
        form: BatchForm,
        *,
        seed: int = 0,
        total_steps: Callable[[int], int] | None = None,
    ) -> TokenCounts:
        """Build some of a run's batches, or all if it is short, and count their tokens.

        `manifest` belongs to `data`. `total_steps` maps an epoch's steps to the run's, by default
        one epoch. Only a part of a very large batch is built.
        """
        from regauge.data import mixture
        from regauge.data.loader import build_loader

        order = mixture.build_row_order(data, manifest, form.rows, seed)
        per_epoch = order.steps_per_epoch
        num_steps = total_steps(per_epoch) if total_steps else per_epoch
        rows = min(form.rows, MAX_SAMPLED_ROWS)
        max_sampled = min(MAX_SAMPLED_STEPS, MAX_SAMPLED_ROWS // rows)
        sampled = range(0, num_steps, -(-num_steps // max_sampled))
        is_even = form.rows // form.microbatch_rows % form.processes == 0
        size = 1 if is_even else form.processes
        dataset, lengths = mixture.open_data(data), self.bucket_lengths(manifest)
        loaders = [
            build_loader(
                self,
                dataset,
                "train",
                world=World(rank, size),
                rows=min(form.microbatch_rows, rows),
                bucket_lengths=lengths,
                seed=seed,
            )
            for rank in range(size)
        ]
        if form.has_any_shape and self.packs_texts:
            for loader in loaders:
                loader.pack_texts()
        counts = [
            loader.count_tokens(order.batch(step)[:rows], epoch=order.epoch(step), step=step)
            for step in sampled
            for loader in loaders
        ]
        real, computed = map(sum, zip(*counts, strict=True))
        return TokenCounts(len(sampled) * rows, real, computed)

    def slots_per_row(self) -> int:
        """Return how many texts per row are placed in microbatches independently."""
        return 1

    def sequences_per_row(self, manifest: DatasetManifest) -> int:
        """Return how many sequences the model encodes per row."""
        del manifest
        return self.slots_per_row()

    def split_batch(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,  # [global batch]
        microbatch_rows: int,
        bucket_lengths: tuple[int, ...],
    ) -> list[MicrobatchPlan]:
        """Split a global batch into equally large microbatches."""
        from regauge.data.batches import plan_whole_rows

        del rows
        return plan_whole_rows(row_numbers, microbatch_rows, bucket_lengths[0])

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build one microbatch's arrays."""
        raise NotImplementedError

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        """Build the module to train, in fp32; on the meta device without weights."""
        raise NotImplementedError

    def build_model(
        self, model: Model, manifest: DatasetManifest, seed: int, **options: Any
    ) -> tuple[PreTrainedModel, DropoutKeys]:
        """Build the transformers model with the task's head, as `architectures.build_model`."""
        from regauge.models import architectures

        vocab_size, pad_id = manifest.tokenizer.vocab_size, manifest.tokenizer.pad_token_id
        return architectures.build_model(model, self.head, vocab_size, seed, pad_id, **options)

    def find_head(self, manifest: DatasetManifest) -> ModelHead | None:
        """Return the transformers head, or None if the module has other weights besides.

        A dry run then counts the weights without the module. Ignored if a subclass overrides only
        `build_module`.
        """
        del manifest
        return ModelHead(self.head)

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the weighted loss sum and the weight sum, both scalars."""
        raise NotImplementedError

    def reference_values(self, output: dict[str, Tensor]) -> Tensor:
        """Compute a batch's `reference_columns` from the outputs, [rows, columns] fp32.

        The model has the weights of step 0 and no dropout. The batch contains its rows' `slots`,
        and whether they are `real`.
        """
        raise NotImplementedError

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the batch outputs needed by `metric_sums`, [slots, width] fp32.

        Only called if `metrics_need_all_rows`, or for custom metrics.
        """
        del batch
        return output["vectors"]

    def metric_arrays(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name -> tensor for custom metrics; rows are in held-out order.

        The argument's `vectors` are all `eval_outputs`, without padding rows.
        """
        return {"vectors": outputs["vectors"]}

    def class_report(self, outputs: dict[str, Tensor]) -> ClassReport | None:
        """Compute per-class metrics from all `eval_outputs`; None for tasks without classes.

        The argument's `vectors` are all `eval_outputs`, without padding rows.
        """
        del outputs
        return None

    def derive_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Add metrics that are functions of other means."""
        return means

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return (weighted sum, weight) for each held-out metric; the loss is the first.

        The arguments are one batch. If `metrics_need_all_rows`, they are the whole split instead:
        `vectors`, [slots, width], are all `eval_outputs` in row order, and `real`, [slots], is 0
        for padding rows.
        """
        raise NotImplementedError

    def find_next_command(self, run: str) -> str | None:
        """Return the command that uses a trained model.

        None for custom code, which is imported only for a run file that names it.
        """
        if choices.is_import_path(self.kind):
            return None
        verb = "generate" if self.output_kind() == "text" else "export"
        return shlex.join(("regauge", verb, run))

    def output_kind(self) -> OutputKind:
        """Return what the trained model outputs for a record."""
        return "vectors"

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        """Return the record fields read by the trained model."""
        from regauge.models.io_spec import InputSpec

        return InputSpec(max_lengths=(manifest.columns["tokens"].max_length,))

    def export_prompts(self, manifest: DatasetManifest) -> dict[str, str]:
        """Prompt name -> prompt, for the trained model's folder."""
        del manifest
        return {}

    def prompt_and_reference(
        self, row: dict[str, np.ndarray], prompt_tokens: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Split a held-out row into prompt tokens and reference continuation.

        `prompt_tokens` is the prompt length if the row does not mark one. Returns None for a row
        without a prompt. Only generative tasks have prompts.
        """
        del row, prompt_tokens
        return None

    def fit_baselines(
        self, train: list[dict[str, Any]], heldout: list[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Baseline name -> held-out metrics of a simple model fitted on training rows.

        The rows are those of the dataset. By default a task has none.
        """
        del train, heldout
        return {}

    def baselines(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], records: Sequence[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Baseline name -> metrics of a non-neural baseline on the held-out rows.

        `records` are the held-out records with their texts. By default a task computes none.
        """
        del output, batch, records
        return {}


def find_direction(metric: str, declared: Mapping[str, Direction]) -> Direction | None:
    """Return a metric's direction; None if neither `declared` nor a built-in task has it.

    `declared` is from an evaluation by another task.
    """
    kinds: Iterator[type[Task]] = (choices.load("tasks", name) for name in choices.names("tasks"))
    directions = (task.find_direction(metric) for task in kinds)
    return declared.get(metric) or next(filter(None, directions), None)
