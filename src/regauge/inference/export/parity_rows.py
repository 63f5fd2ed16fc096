"""Artifact rows with their outputs, so that a server can compute them again and compare.

    parity_rows.json         the texts and features of the rows, and their origin
    parity_rows.safetensors  the outputs; also the inputs of rows without texts

The outputs come from the compiled program, not the reference. Texts are stored instead of tokens,
so that tokenization, prompts, pooling and normalization are compared as well. Rows for custom
modules and synthetic rows for rankers store tensors instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from regauge.config import FORMAT
from regauge.inference.export.manifest import PARITY_ROWS, PARITY_TENSORS
from regauge.inference.export.preprocess import build_preprocessor
from regauge.inference.export.quality import matching_prefix_fraction
from regauge.inference.export.records import TensorRecords, TextRecords, TokenizedTexts
from regauge.system.errors import DataError
from regauge.system.files import write_json
from regauge.system.json_files import DocumentShape, read_json
from regauge.system.safetensors_io import write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from regauge.accelerators import Precision
    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.engine import Engine
    from regauge.inference.export.preprocess import Preprocessor
    from regauge.inference.export.probe_texts import ProbeTexts
    from regauge.inference.export.records import Records
    from regauge.models.io_spec import OutputKind

RELATIVE_LIMIT = 1e-3
"""Maximum difference, relative to a row's largest magnitude or to 1, whichever is larger."""
ROUNDING: dict[Precision, float] = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""Maximum difference relative to a row's largest magnitude: one unit in the last digit."""
NORM_LIMIT = 1e-3
"""Maximum distance between 1 and a normalized vector's norm."""
MIN_MATCHING_TOKENS = 0.5
"""Minimum fraction of generated tokens equal before the first difference: rounding may change a
close decision, and every token after it."""
MAX_GENERATED_ROWS = 4
"""Maximum rows for a text generator: each token is a forward pass."""
MAX_EXCERPT = 40
"""Characters shown per text in a message."""
REMEDY = "export the artifact again on this machine"
COPY_REMEDY = "copy the artifact again, or export it"
OUTPUTS = "outputs"


class RowDifference(NamedTuple):
    """A row whose outputs differ from the stored ones."""

    row: int
    """Row number, from 0."""
    excerpt: str
    """Start of the first text; empty without texts."""
    problem: str
    """The measured difference and the limit."""


class ParityRowsShape(DocumentShape):
    origin: str
    columns: list[list[str]]
    values: dict[str, list[Any]]
    output_kind: str
    precision: str


@dataclass(frozen=True)
class ParityRows:
    """Rows with the exported program's outputs."""

    origin: str
    """Where the rows come from, such as a dataset."""
    output_kind: OutputKind
    precision: Precision
    """Precision of the compiled program."""
    columns: list[list[str]]
    """One list of texts per text field; empty without texts."""
    values: dict[str, list[Any]]
    """Ranking candidates' numeric and categorical features, by field name."""
    records: Records | None
    """The rows' tensors, if there are no texts."""
    outputs: np.ndarray
    """Stored outputs, [rows, width] fp32."""

    def encode(self, preprocessor: Preprocessor | None) -> Records:
        """Return the rows as program inputs; rows with texts need a preprocessor."""
        if self.records is not None:
            return self.records
        if preprocessor is None:
            raise ValueError("rows with texts need a preprocessor")
        return preprocessor.encode_records(self.columns, values=self.values).records

    def excerpt(self, row: int) -> str:
        """Return the start of a row's first text, in one line; empty without texts."""
        if not self.columns:
            return ""
        text = " ".join(self.columns[0][row].split())
        return text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT]}…"


def select_rows(records: Records, probe: ProbeTexts, count: int) -> np.ndarray:
    """Return at most `count` record indices, from the shortest to the longest.

    Lengths are spread evenly over those that occur. Among records of one length, the one with the
    fewest characters is preferred.
    """
    num_characters = np.zeros(len(records), np.int64)
    for texts in probe.columns:
        num_characters += [len(text) for text in texts]
    order = np.lexsort((num_characters, records.lengths))
    _, firsts = np.unique(records.lengths[order], return_index=True)
    candidates = order[firsts] if len(firsts) >= count else order
    positions = np.linspace(0, len(candidates) - 1, min(count, len(candidates)))
    selected: np.ndarray = candidates[positions.round().astype(np.int64)]
    return selected


def compute_rows(engine: Engine, records: Records) -> np.ndarray:
    """Compute each record alone; return the outputs, [records, width] fp32.

    A batch's shape may change an output's last bits. A record alone has one shape.
    """
    outputs = np.zeros((len(records), engine.output_size), np.float32)
    for index, num_tokens in enumerate(records.lengths.tolist()):
        length = engine.buckets.find_length(num_tokens)
        outputs[index] = engine.compute_bucket(records.select(np.array([index])), length)[0]
    return outputs


def build_parity_rows(
    records: Records,
    probe: ProbeTexts,
    engine: Engine,
    *,
    output_kind: OutputKind,
    precision: Precision,
    count: int,
) -> ParityRows:
    """Return at most `count` records with an engine's outputs.

    `probe` has the records' texts; without texts, their tensors are stored.
    """
    count = min(count, MAX_GENERATED_ROWS) if output_kind == "text" else count
    indices = select_rows(records, probe, count)
    selected = records.select(indices)
    return ParityRows(
        origin=probe.origin,
        output_kind=output_kind,
        precision=precision,
        columns=[[texts[index] for index in indices] for texts in probe.columns],
        values={
            name: [column[index] for index in indices] for name, column in probe.values.items()
        },
        records=None if probe.columns else selected,
        outputs=compute_rows(engine, selected),
    )


def write_parity_rows(folder: Path, rows: ParityRows) -> None:
    tensors = {OUTPUTS: rows.outputs, **_name_arrays(rows.records)}
    document = {name: getattr(rows, name) for name in ParityRowsShape.model_fields}
    write_json(folder / PARITY_ROWS, {"format": FORMAT, **document})
    write_tensors(
        folder / PARITY_TENSORS,
        {name: torch.from_numpy(values) for name, values in tensors.items()},
    )


def read_parity_rows(artifact: Artifact) -> ParityRows | None:
    """Read an artifact's rows; None if it has none, as with older versions.

    Raises DataError if a file is damaged.
    """
    if PARITY_ROWS not in artifact.manifest.files:
        return None
    path = artifact.folder / PARITY_ROWS
    document = read_json(path, COPY_REMEDY, ParityRowsShape)
    try:
        tensors = load_file(artifact.folder / PARITY_TENSORS)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{artifact.folder / PARITY_TENSORS}: {error}", COPY_REMEDY) from None
    outputs = tensors.pop(OUTPUTS, None)
    columns, values = document["columns"], document["values"]
    records = None if columns else _build_records(tensors)
    counts = [len(column) for column in (*columns, *values.values())]
    counts += [] if records is None else [len(records)]
    if outputs is None or {len(outputs)} != set(counts):
        raise DataError(f"{path} and its outputs differ in their number of rows", COPY_REMEDY)
    fields = {name: document[name] for name in ParityRowsShape.model_fields}
    return ParityRows(**fields, records=records, outputs=outputs)


def check_parity_rows(
    rows: ParityRows,
    compute: Callable[[Records], np.ndarray],
    preprocessor: Preprocessor | None = None,
) -> None:
    """Compute the rows again, and raise DataError if an output differs from the stored one.

    `compute` returns record outputs, [records, width] fp32, for example `compute_rows`, which
    computes each row in the export's shape. `preprocessor` encodes the rows' texts. Text is
    compared as generated without draws. The error names the first row that differs.
    """
    differences = list_differences(rows, compute(rows.encode(preprocessor)))
    if differences:
        difference = differences[0]
        excerpt = f" ('{difference.excerpt}')" if difference.excerpt else ""
        problem = f"row {difference.row} of {PARITY_ROWS}{excerpt} {difference.problem}"
        raise DataError(problem, REMEDY)


def check_artifact(artifact: Artifact, compute: Callable[[Records], np.ndarray]) -> None:
    """Compute an artifact's parity rows again; does nothing if it has none.

    `compute` returns record outputs. Raises the errors from `read_parity_rows` and
    `check_parity_rows`.
    """
    rows = read_parity_rows(artifact)
    if rows is None:
        return
    check_parity_rows(rows, compute, build_preprocessor(artifact))


def list_differences(rows: ParityRows, outputs: np.ndarray) -> list[RowDifference]:
    """Return the rows whose outputs, [rows, width] fp32, differ from the stored ones.

    Numbers differ by more than `RELATIVE_LIMIT` or the precision's rounding. Normalized vectors
    must have the norm 1, too. Generated tokens are compared over all rows.
    """
    stored = rows.outputs
    if outputs.shape != stored.shape:
        widths = f"has {_format_shape(outputs)}; {_format_shape(stored)} were exported"
        return [RowDifference(0, rows.excerpt(0), widths)]
    if rows.output_kind == "text":
        return _list_token_differences(rows, outputs)
    is_normalized = rows.output_kind == "vectors" and bool(
        (np.abs(np.linalg.norm(stored, axis=1) - 1) <= NORM_LIMIT).all()
    )
    differences = []
    for row, (actual, expected) in enumerate(zip(outputs, stored, strict=True)):
        problem = _describe_difference(actual, expected, rows.precision)
        if problem is None and is_normalized:
            problem = _describe_norm(actual)
        if problem is not None:
            differences.append(RowDifference(row, rows.excerpt(row), problem))
    return differences


def _describe_difference(
    actual: np.ndarray, expected: np.ndarray, precision: Precision
) -> str | None:
    """Describe how two rows of numbers, [width], differ; None if within the limit."""
    is_finite = np.isfinite(actual)
    if not np.array_equal(is_finite, np.isfinite(expected)):
        return f"has {int((~is_finite).sum())} numbers that are not finite"
    difference = float(np.abs(actual - expected)[is_finite].max(initial=0.0))
    scale = float(np.abs(expected)[is_finite].max(initial=0.0))
    limit = max(RELATIVE_LIMIT * max(1.0, scale), ROUNDING.get(precision, 0.0) * scale)
    if difference <= limit:
        return None
    return f"differs by {difference:.3g} from the export; the limit is {limit:.3g}"


def _describe_norm(vector: np.ndarray) -> str | None:
    """Describe how far a vector's norm, [width], is from 1; None if within the limit."""
    norm = float(np.linalg.norm(vector))
    if abs(norm - 1) <= NORM_LIMIT:
        return None
    return f"has the norm {norm:.4f}; normalized vectors have 1 within {NORM_LIMIT:g}"


def _list_token_differences(rows: ParityRows, outputs: np.ndarray) -> list[RowDifference]:
    """Return the rows with other tokens, if too few of all tokens are equal."""
    fraction = matching_prefix_fraction(outputs, rows.outputs)
    if fraction >= MIN_MATCHING_TOKENS:
        return []
    differences = []
    for row, (actual, expected) in enumerate(zip(outputs, rows.outputs, strict=True)):
        if matching_prefix_fraction(actual[None], expected[None]) < MIN_MATCHING_TOKENS:
            first = int(np.flatnonzero(actual != expected)[0])
            problem = (
                f"has another token at {first}; {fraction:.0%} of the tokens of all rows are"
                f" equal before the first difference, and the limit is {MIN_MATCHING_TOKENS:.0%}"
            )
            differences.append(RowDifference(row, rows.excerpt(row), problem))
    return differences


def _format_shape(outputs: np.ndarray) -> str:
    return f"{' x '.join(map(str, outputs.shape))} numbers"


def _name_arrays(records: Records | None) -> dict[str, np.ndarray]:
    if records is None:
        return {}
    if isinstance(records, TensorRecords):
        return _number("input", records.arrays)
    return {
        **_number("ids", [texts.ids for texts in records.texts]),
        **_number("lengths", [texts.lengths for texts in records.texts]),
        **_number("feature", records.features),
    }


def _number(name: str, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}.{index}": np.ascontiguousarray(value) for index, value in enumerate(arrays)}


def _build_records(tensors: dict[str, np.ndarray]) -> Records:
    """Return the records named by `_name_arrays`."""

    def list_arrays(name: str) -> list[np.ndarray]:
        count = sum(key.startswith(f"{name}.") for key in tensors)
        return [tensors[f"{name}.{index}"] for index in range(count)]

    if inputs := list_arrays("input"):
        return TensorRecords(inputs)
    texts = map(TokenizedTexts, list_arrays("ids"), list_arrays("lengths"))
    return TextRecords(list(texts), list_arrays("feature"))
