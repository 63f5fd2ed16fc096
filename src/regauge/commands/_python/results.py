"""Typed results of verbs.

A result is a read-only mapping with the document printed by the command with `--json`. Its
attributes have the types that a program needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, eq=False, repr=False)
class Result(Mapping[str, Any]):
    """A verb's result; `result["key"]` is an entry in its document."""

    document: dict[str, Any]
    """The whole result, JSON-ready."""

    def __getitem__(self, key: str) -> Any:
        return self.document[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.document)

    def __len__(self) -> int:
        return len(self.document)

    def __repr__(self) -> str:
        entries = ", ".join(f"{name}={value!r}" for name, value in self.document.items())
        return f"{type(self).__name__}({entries})"


class DryRunPlan(Result):
    """A verb's planned work, with `dry_run=True`."""

    @property
    def error(self) -> str | None:
        """Why the verb would refuse the output folder, or None."""
        return self.document.get("error")


class PrepareResult(Result):
    """A prepared dataset; with several row layouts see `datasets`."""

    @property
    def folder(self) -> Path:
        """Dataset folder."""
        return Path(self.document["dataset"])

    @property
    def train_rows(self) -> int:
        """Number of training rows."""
        return int(self.document["train_rows"])

    @property
    def heldout_rows(self) -> int:
        """Number of held-out rows."""
        return int(self.document["heldout_rows"])

    @property
    def fingerprint(self) -> str:
        """Hash of all rows and their order."""
        return str(self.document["fingerprint"])

    @property
    def warnings(self) -> list[str]:
        """Warnings about the data."""
        return list(self.document["warnings"])

    @property
    def datasets(self) -> dict[str, PrepareResult]:
        """Layout name -> dataset; with one layout, the name is an empty string."""
        if "dataset" in self.document:
            return {"": self}
        return {name: PrepareResult(item) for name, item in self.document.items()}


class TrainResult(Result):
    """A finished run."""

    @property
    def folder(self) -> Path:
        """Run output folder."""
        return Path(self.document["output"])

    @property
    def model_folder(self) -> Path:
        """Folder of the final model, which transformers loads."""
        return self.folder / "model"

    @property
    def steps(self) -> int:
        """Number of optimizer updates."""
        return int(self.document["steps"])

    @property
    def model_step(self) -> int:
        """Step of the final model's weights."""
        return int(self.document["model_step"])

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint, if any."""
        step: int | None = self.document["best_step"]
        return step

    @property
    def stop_reason(self) -> str:
        """`finished`, or why the run ended early."""
        return str(self.document["stop_reason"])

    @property
    def metrics(self) -> dict[str, float]:
        """Final held-out metrics by name; empty if no rows are held out."""
        return dict(self.document["metrics"])

    @property
    def initial_metrics(self) -> dict[str, float]:
        """Held-out metrics before the first step."""
        return dict(self.document["initial_metrics"])

    @property
    def seconds(self) -> float:
        """Seconds over all attempts."""
        return float(self.document["seconds"])

    @property
    def tokens(self) -> int:
        """Token count without padding."""
        return int(self.document["tokens"])

    @property
    def usd(self) -> float | None:
        """Cost in dollars; None if the price is unknown."""
        return self.document.get("usd")


class EvaluateResult(Result):
    """Model metrics on held-out rows."""

    @property
    def path(self) -> Path:
        """Result file."""
        return Path(self.document["output"])

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Model or baseline name -> table columns."""
        rows = self.document["rows"]
        return {
            row["name"]: {key: value for key, value in row.items() if key != "name"} for row in rows
        }


class ExportResult(Result):
    """A model in another format."""

    @property
    def path(self) -> Path:
        """Written folder or file."""
        return Path(self.document["path"])


class PredictResult(Result):
    """A job's predictions."""

    @property
    def folder(self) -> Path:
        """Job output folder."""
        return Path(self.document["output"])

    @property
    def rows(self) -> int:
        """Number of predictions."""
        return int(self.document["rows"])

    def read_table(self) -> pa.Table:
        """Return all predictions in record order as a pyarrow table.

        Raises FileNotFoundError if the job wrote another format than Parquet.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        files = sorted(self.folder.rglob("*.parquet"))
        if not files:
            raise FileNotFoundError(f"{self.folder} does not contain a Parquet file")
        return pa.concat_tables([pq.read_table(file) for file in files])


RESULTS: dict[str, type[Result]] = {
    "prepare": PrepareResult,
    "train": TrainResult,
    "evaluate": EvaluateResult,
    "export": ExportResult,
    "predict": PredictResult,
}
"""Verb -> result type; all other verbs return a `Result`."""


def build_result(verb: str, document: dict[str, Any], *, is_plan: bool) -> Result:
    """Return a verb's typed result."""
    return DryRunPlan(document) if is_plan else RESULTS.get(verb, Result)(document)
