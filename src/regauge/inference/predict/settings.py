"""The run file tables that `predict` reads; does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, field_validator

from regauge.config import Settings, choice_of
from regauge.data.sources import Source
from regauge.data.values import FieldKind
from regauge.inference.export.manifest import Dtype
from regauge.inference.predict.executors import Executor
from regauge.machines.settings import Price
from regauge.models.settings import GREEDY, Generation
from regauge.monitoring.settings import Monitoring


class PredictOutput(Settings):
    """The files that `predict` writes."""

    folder: str
    """Output folder; several jobs on several machines may share it."""
    format: Literal["parquet", "jsonl", "csv", "npy"] = "parquet"
    """`parquet`, `jsonl` and `csv` write tables; `npy` writes vector arrays, and Parquet tables
    with the other fields. In `csv`, nested values become JSON text."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Type of a vector. `auto` is `float16` for normalized vectors, else `float32`, as `float16`
    holds numbers up to 65,504. `int8` adds a scale per vector; `binary` packs eight signs per
    byte."""
    keep_fields: Literal["all"] | tuple[str, ...] | dict[str, FieldKind] = "all"
    """Record fields to copy into the output; by default every field seen in the first 1,000
    records, for vectors except the model's inputs. A table also sets their kinds, such as
    `{ id = "uint64" }`."""


class PredictOptions(Settings):
    """How records are read and grouped into shards."""

    text_fields: tuple[str, ...] = ()
    """Text fields; by default the model's, else `text`, else the only text field. With a chat
    template the default is `messages`, else `instruction` with `input`."""
    prompt_name: str | None = None
    """Artifact prompt to prepend to each text; by default the artifact's default prompt."""
    batch_invariant: bool = True
    """Whether an output must have the same bits in every batch; needs an artifact with a proof."""
    shard_records: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """Maximum records per shard, the unit that is computed, committed and retried; `auto` is 32768,
    and 1024 for generated text."""
    job_index: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """Index of this job if several share the records; `auto` reads it from Slurm or Kubernetes."""
    job_count: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1, union_mode="left_to_right"
    )
    """How many jobs share the records and the output folder; `auto` reads it from the Slurm
    array."""
    verify_shards: bool = True
    """Whether to hash the job's finished shards, and compute changed ones again."""
    max_usd: float | None = Field(default=None, gt=0)
    """Cost limit in dollars; the job stops there, and a command with a higher limit resumes it."""


class PredictExecution(Settings):
    """Processes that compute the shards; none of these settings changes the output."""

    price: Price | None = None
    """Machine price."""
    executor: Annotated[SerializeAsAny[Executor], choice_of("executors")] = Field(
        default="local", validate_default=True
    )
    """Runs workers in this process (inline), in local processes, or on a Ray cluster."""
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """Worker processes; `auto` starts one per device, or uses all CPU cores."""
    max_attempts: int = Field(default=3, ge=1)
    """How many workers a shard may crash before the job fails."""
    hang_timeout_seconds: float = Field(default=600, gt=0)
    """How long a worker may report no progress before it is replaced."""


class PredictSettings(Settings):
    """All settings for a prediction job."""

    artifact: str
    """Artifact folder; a run or model folder, which then runs without compilation; or a model
    registry version such as `registry/qa@production`."""
    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")]
    """Records to process."""
    output: PredictOutput
    """Files to write."""
    generation: Generation = GREEDY
    """How a causal model generates text."""
    predict: PredictOptions = PredictOptions()
    """How records are read and grouped into shards."""
    execution: PredictExecution = PredictExecution()
    """Processes that compute the shards."""
    monitoring: Monitoring = Monitoring()
    """How to watch the job."""

    @field_validator("source")
    @classmethod
    def _keep_duplicates(cls, source: Source) -> Source:
        """Keep duplicate records; reject a source that was set to drop them."""
        if source.duplicates == "drop" and "duplicates" in source.model_fields_set:
            raise ValueError("predict processes every record; remove source.duplicates")
        return source.model_copy(update={"duplicates": "keep"})
