"""The tasks of a run: `[task]`, or a `[[task]]` for each of several; no torch here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from regauge.config import Settings, build, choose, chosen
from regauge.data.settings import Part
from regauge.tasks import Task


class OwnData(Settings):
    """The dataset of one of several tasks."""

    path: str
    """Folder of the dataset; its tokenizer is that of the others."""
    mix: tuple[Part, ...] = ()
    """Datasets that are mixed in."""


class OwnBatch(Settings):
    """The unit of training of one of several tasks; by default that of the run."""

    rows: int | None = Field(default=None, ge=1)
    """Rows of a global batch."""
    microbatch_rows: int | None = Field(default=None, ge=1)
    """Rows that a process computes at a time."""


class Entry(Settings):
    """One of several tasks of a run, `[[task]]`: its keys, and these beside them."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]*$")
    """Word for it in the names of metrics and folders."""
    weight: int = Field(default=1, ge=1, le=1000)
    """How many of the steps it gets for each one that a task of weight 1 gets."""
    data: OwnData | None = None
    """Its dataset, where that is another than the run's."""
    batch: OwnBatch = OwnBatch()
    """What its steps see, where that is not the run's batch."""
    task: Annotated[SerializeAsAny[Task], chosen("tasks")]
    """The objective; its keys stand in the table itself."""

    @model_serializer(mode="wrap")
    def _in_one_table(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        own = handler(self)
        return {**own.pop("task"), **own}


def _one_or_several(value: Any) -> Any:
    if not isinstance(value, tuple | list):
        return choose("tasks", value)
    return tuple(_entry(each, number) for number, each in enumerate(value, start=1))


def _entry(value: Any, number: int) -> Any:
    """Return one of several tasks; its keys stand beside those of the objective."""
    if not isinstance(value, dict):
        return value
    own = {key: item for key, item in value.items() if key in Entry.model_fields}
    rest = {key: item for key, item in value.items() if key not in own}
    return build(Entry, {"task": rest, **own}, where=f"task {value.get('name', number)}")


One = Annotated[SerializeAsAny[Task], chosen("tasks")]
Tasks = Annotated[One | tuple[Entry, ...], BeforeValidator(_one_or_several)]
"""One task, or several that take turns."""
