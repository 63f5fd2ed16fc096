"""Base class for tasks that predict classes: how many there are, and their names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from regauge.models.io_spec import read_class_names
from regauge.system.errors import SettingsError
from regauge.system.json_files import find_json
from regauge.system.log import logger
from regauge.tasks._fields import FieldsTask

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.data.dataset import ColumnInfo, DatasetManifest

MIN_CLASSES = 2
MAX_LOGGED_NAMES = 10


class ClassesTask(FieldsTask):
    """A task whose labels are class numbers from 0, usually with names."""

    has_classes: ClassVar[bool] = True

    classes: int | None = Field(default=None, ge=MIN_CLASSES, le=4096)
    """Number of classes; by default as in the dataset."""
    class_names: tuple[str, ...] = ()
    """Class names in order, for config.json, exports and predictions; by default as in the
    dataset."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_classes(cls, table: Any) -> Any:
        names = table.get("class_names") if isinstance(table, dict) else None
        return {"classes": len(names), **table} if names and isinstance(names, tuple) else table

    @model_validator(mode="after")
    def _check_class_names(self) -> Self:
        names = self.class_names
        if names and len(names) != self.classes:
            raise ValueError(
                f"class_names has {len(names)} names and classes is {self.classes}; remove classes"
            )
        if len(set(names)) < len(names):
            raise ValueError("class_names has a name twice; give each class its own name")
        return self

    @property
    def class_field(self) -> str:
        """Class field; empty if the task does not predict classes."""
        raise NotImplementedError

    def resolve_defaults(self, manifest: DatasetManifest) -> Self:
        """Take the number of classes and their names from the dataset."""
        column = manifest.columns.get(self.class_field)
        if column is None:
            return self
        names = self.class_names or column.class_names or ()
        classes = self.classes or len(names) or max(MIN_CLASSES, column.num_classes or 0)
        return self.model_copy(update={"classes": classes, "class_names": names})

    def check_named_classes(self, column: ColumnInfo) -> None:
        """Raise SettingsError if dataset and task name different classes."""
        label, names = self.class_field, column.class_names
        if names is None:
            return
        if self.class_names and self.class_names != names:
            problem = f"the class names of '{label}' are {', '.join(names[:MAX_LOGGED_NAMES])}"
            ours = _format_names(self.class_names)
            remedy = f"remove task.class_names, or set rows.labels.{label} = {ours}"
            raise SettingsError(f"{problem}, and task.class_names differ", remedy)
        if self.classes and self.classes != len(names):
            problem = f"'{label}' has {len(names)} classes, and task.classes = {self.classes}"
            raise SettingsError(problem, "remove task.classes")

    def check_weights(self, folder: Path) -> None:
        """Warn if the start model has class names, and the classes here do not."""
        from regauge.models.tokenizer_convention import COPY_REMEDY
        from regauge.system.hub import CONFIG

        if self.class_names or not self.class_field:
            return
        config = find_json(folder / CONFIG, COPY_REMEDY) or {}
        names = read_class_names(config.get("id2label"))
        if not names:
            return
        is_usable = len(names) == self.classes and len(names) <= MAX_LOGGED_NAMES
        logger.warning(
            "%s: its class names are not used: %s; name the classes with task.class_names%s",
            folder,
            ", ".join(names[:MAX_LOGGED_NAMES]),
            f" = {_format_names(names)}" if is_usable else "",
        )


def _format_names(names: tuple[str, ...]) -> str:
    return json.dumps(names, ensure_ascii=False)
