"""Typed results of verbs.

A result is a read-only mapping with the document that the command prints with `--json`. Its
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
    """Result of a verb; `result["key"]` is an entry of its document."""

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
    """The planned work of a verb, with `dry_run=True`."""

    @property
    def error(self) -> str | None:
        """Why the verb would refuse its output folder; None if it would not."""
        return self.document.get("error")


class PrepareResult(Result):
    """A prepared dataset; with several row layouts see `datasets`."""

    @property
    def folder(self) -> Path:
        """Folder of the dataset."""
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
        """The datasets by the name of their layout; the name of an only one is empty."""
        if "dataset" in self.document:
            return {"": self}
        return {name: PrepareResult(item) for name, item in self.document.items()}


class TrainResult(Result):
    """A finished run."""

    @property
    def folder(self) -> Path:
        """Output folder of the run."""
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
        """Step of the weights of the final model."""
        return int(self.document["model_step"])

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint; None if there is none."""
        step: int | None = self.document["best_step"]
        return step

    @property
    def stop_reason(self) -> str:
        """`finished`, or why the run ended before its last step."""
        return str(self.document["stop_reason"])

    @property
    def metrics(self) -> dict[str, float]:
        """Held-out metrics of the final model by name; empty if no rows are held out."""
        return dict(self.document["metrics"])

    @property
    def initial_metrics(self) -> dict[str, float]:
        """Held-out metrics before the first step."""
        return dict(self.document["initial_metrics"])

    @property
    def seconds(self) -> float:
        """Seconds of all attempts."""
        return float(self.document["seconds"])

    @property
    def tokens(self) -> int:
        """Number of tokens, without padding."""
        return int(self.document["tokens"])

    @property
    def usd(self) -> float | None:
        """Cost in dollars; None if the price is unknown."""
        return self.document.get("usd")


class EvaluateResult(Result):
    """Metrics of models on held-out rows."""

    @property
    def path(self) -> Path:
        """The file with the result."""
        return Path(self.document["output"])

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The columns of the table by the name of the model or baseline."""
        rows = self.document["rows"]
        return {
            row["name"]: {key: value for key, value in row.items() if key != "name"} for row in rows
        }


class ExportResult(Result):
    """A model in another format."""

    @property
    def path(self) -> Path:
        """The folder or file that was written."""
        return Path(self.document["path"])


class PredictResult(Result):
    """The predictions of a job."""

    @property
    def folder(self) -> Path:
        """Output folder of the job."""
        return Path(self.document["output"])

    @property
    def rows(self) -> int:
        """Number of predictions."""
        return int(self.document["rows"])

    def read_table(self) -> pa.Table:
        """Return all predictions in the order of the records, as a table of pyarrow.

        Raises FileNotFoundError if the job wrote another format than Parquet.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        files = sorted(self.folder.rglob("*.parquet"))
        if not files:
            raise FileNotFoundError(f"{self.folder} has no Parquet file")
        return pa.concat_tables([pq.read_table(file) for file in files])


RESULTS: dict[str, type[Result]] = {
    "prepare": PrepareResult,
    "train": TrainResult,
    "evaluate": EvaluateResult,
    "export": ExportResult,
    "predict": PredictResult,
}
"""Types of results by verb; all other verbs return a `Result`."""


def build_result(verb: str, document: dict[str, Any], *, is_plan: bool) -> Result:
    """Return the typed result of a verb."""
    return DryRunPlan(document) if is_plan else RESULTS.get(verb, Result)(document)
