"""The rows that an artifact stores: computed again they are equal, and damage is named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from distributed import datasets
from end_to_end.predicting import EAGER, export_run, train_model, update_manifest, write_records
from end_to_end.test_custom_module import CODE
from regauge.cli import main
from regauge.inference.export.artifact import open_artifact
from regauge.inference.export.engine import load_engine
from regauge.inference.export.parity_rows import (
    RELATIVE_LIMIT,
    ParityRows,
    check_parity_rows,
    compute_rows,
    list_differences,
    read_parity_rows,
    select_rows,
)
from regauge.inference.export.preprocess import build_preprocessor
from regauge.inference.export.probe_texts import ProbeTexts
from regauge.inference.export.records import TensorRecords, TextRecords
from regauge.system import choices
from regauge.system.errors import DataError
from unit.runners import random_ids

QUICK_EXPORT = (*EAGER, "parity.metrics=false", "buckets.lengths=[8,16,32]")
TASKS: dict[str, Callable[[Path], Path]] = {
    "classify": datasets.write_pairs,
    "tokens": datasets.write_tagged,
    "rank": datasets.write_groups,
    "clm": datasets.write_packed,
}


@pytest.fixture(scope="module", params=["encoder", *TASKS, "module"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a small model of each output kind."""
    if request.param == "encoder":
        return Path(request.getfixturevalue("encoder"))
    folder = tmp_path_factory.mktemp(request.param)
    if request.param != "module":
        run = train_model(folder, request.param, TASKS[request.param])
        options = ["text.max_new_tokens=4"] if request.param == "clm" else []
        return export_run(run, folder / "artifact", *QUICK_EXPORT, *options)
    (folder / "parity_module.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        command = ["export", "--module", "parity_module:tensor", "--to", str(folder / "artifact")]
        assert main([*command, *EAGER, "parity.batch_invariance=false"]) == 0
    return folder / "artifact"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    texts = write_records(folder / "texts.jsonl", 40)
    source = f'parity.source={{kind="jsonl",files=["{texts}"]}}'
    return export_run(train_model(folder), folder / "artifact", *QUICK_EXPORT, source)


def check_artifact(folder: Path) -> ParityRows:
    """Compute the rows of an artifact again with its loaded program; return the stored rows."""
    artifact = open_artifact(folder)
    rows = read_parity_rows(artifact)
    assert rows is not None
    engine = load_engine(artifact, batch_invariant=False, threads=1)
    preprocessor = build_preprocessor(artifact)
    check_parity_rows(rows, lambda records: compute_rows(engine, records), preprocessor)
    return rows


def copy_artifact(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def test_the_rows_of_every_output_kind_are_computed_again(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(original.parent))
    choices.allow_imports("parity_module")
    rows = check_artifact(original)
    is_text = rows.output_kind in {"vectors", "classes", "entities", "text"}
    assert (len(rows.columns) > 0, rows.records is None) == (is_text, is_text)
    assert len(rows.outputs) == (4 if rows.output_kind == "text" else 8)
    assert rows.outputs.dtype == np.float32
    assert np.abs(rows.outputs).max() > 0
    sys.modules.pop("parity_module", None)


def test_the_stored_texts_have_different_lengths(encoder: Path) -> None:
    rows = check_artifact(encoder)
    [texts] = rows.columns
    lengths = [len(text.split()) for text in texts]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == len(lengths) == 8
    assert rows.origin == "source 'jsonl'"


@pytest.mark.parametrize(
    ("table", "changes", "problem"),
    [
        ("pooling", {"modes": ["cls"]}, r"row \d of parity_rows\.json \('w.*'\) differs by"),
        ("pooling", {"normalize": False}, r"row 0 of parity_rows\.json"),
        (
            "tokenization",
            {"prompts": {"q": "w9 "}, "default_prompt": "q"},
            r"row 0 of parity_rows\.json",
        ),
    ],
)
def test_other_pooling_or_another_prompt_is_reported_with_the_row(
    encoder: Path, tmp_path: Path, table: str, changes: dict[str, Any], problem: str
) -> None:
    folder = copy_artifact(encoder, tmp_path)
    update_manifest(folder, lambda it: it["program"][table].update(changes))
    with pytest.raises(DataError, match=problem) as error:
        check_artifact(folder)
    assert error.value.remedy == "export the artifact again on this machine"


def test_other_weights_are_reported(encoder: Path, tmp_path: Path) -> None:
    folder = copy_artifact(encoder, tmp_path)
    path = folder / "weights.safetensors"
    torch.manual_seed(1)
    weights = {
        name: value + 0.1 * torch.randn_like(value) if value.is_floating_point() else value
        for name, value in load_file(path).items()
    }
    save_file(weights, path)
    update_manifest(folder)
    with pytest.raises(DataError, match=r"row 0 of parity_rows\.json"):
        check_artifact(folder)


def test_an_artifact_may_store_no_rows(encoder: Path, tmp_path: Path) -> None:
    options = (*QUICK_EXPORT, "parity.stored_rows=0", "parity.batch_invariance=false")
    folder = export_run(encoder.parent / "run", tmp_path / "artifact", *options)
    assert not list(folder.glob("parity_rows*"))
    assert read_parity_rows(open_artifact(folder)) is None


def test_an_older_artifact_has_no_rows(encoder: Path, tmp_path: Path) -> None:
    folder = copy_artifact(encoder, tmp_path)
    for path in folder.glob("parity_rows*"):
        path.unlink()
    update_manifest(folder)
    assert read_parity_rows(open_artifact(folder)) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("parity_rows.json", b"{", "cannot be read"),
        ("parity_rows.json", b"{}", "'origin' is missing"),
        ("parity_rows.safetensors", b"12345678", "parity_rows.safetensors"),
    ],
)
def test_damaged_rows_are_refused(
    encoder: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = copy_artifact(encoder, tmp_path)
    (folder / name).write_bytes(content)
    update_manifest(folder)
    with pytest.raises(DataError, match=message):
        read_parity_rows(open_artifact(folder))


def test_a_missing_row_is_refused(encoder: Path, tmp_path: Path) -> None:
    folder = copy_artifact(encoder, tmp_path)
    document = json.loads((folder / "parity_rows.json").read_text())
    document["columns"][0].pop()
    (folder / "parity_rows.json").write_text(json.dumps(document))
    update_manifest(folder)
    with pytest.raises(DataError, match="differ in their number of rows"):
        read_parity_rows(open_artifact(folder))


def make_rows(outputs: Any, **changes: Any) -> ParityRows:
    values = np.array(outputs, np.float32)
    texts = [f"text {index}" for index in range(len(values))]
    fields = {"output_kind": "values", "precision": "fp32", "columns": [texts], **changes}
    return ParityRows(origin="", values={}, records=None, outputs=values, **fields)


@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
def test_the_limit_is_relative_to_the_scale_of_a_row(scale: float) -> None:
    limit = RELATIVE_LIMIT * max(1, scale)
    rows = make_rows([[scale, 0], [scale, 0]])
    outputs = rows.outputs.copy()
    outputs[1, 1] += 0.9 * limit
    assert not list_differences(rows, outputs)
    outputs[1, 1] += 0.2 * limit
    [difference] = list_differences(rows, outputs)
    assert (difference.row, difference.excerpt) == (1, "text 1")
    assert difference.problem.endswith(f"the limit is {limit:.3g}")


def test_reduced_precision_may_differ_by_its_rounding() -> None:
    outputs = np.array([[8.03]], np.float32)
    assert not list_differences(make_rows([[8]], precision="bf16"), outputs)
    assert list_differences(make_rows([[8]], precision="fp32"), outputs)
    assert list_differences(make_rows([[8]], precision="bf16"), outputs + 0.1)


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ([[1.0], [1.0]], "has 2 x 1 numbers; 2 x 2 numbers were exported"),
        ([[1.0, np.nan], [0.0, 1.0]], "has 1 numbers that are not finite"),
    ],
)
def test_outputs_must_have_the_width_and_be_finite(outputs: Any, problem: str) -> None:
    rows = make_rows([[1, 0], [0, 1]])
    [difference] = list_differences(rows, np.array(outputs, np.float32))
    assert difference.problem == problem


def test_normalized_vectors_need_the_norm_one() -> None:
    width = 4096  # so many small differences are within the limit of each
    rows = make_rows(np.full((1, width), width**-0.5), output_kind="vectors")
    [difference] = list_differences(rows, rows.outputs * 1.02)
    assert difference.problem == "has the norm 1.0200; normalized vectors have 1 within 0.001"
    assert not list_differences(make_rows(rows.outputs, output_kind="values"), rows.outputs * 1.02)


def test_generated_tokens_may_differ_late() -> None:
    rows = make_rows([[5, 6, 7, 8], [5, 6, -1, -1]], output_kind="text")
    late = np.array([[5, 6, 7, 9], [5, 6, -1, -1]], np.float32)
    early = np.array([[9, 6, 7, 8], [5, 6, -1, -1]], np.float32)
    assert not list_differences(rows, late)
    [difference] = list_differences(rows, early)
    assert difference.row == 0
    assert difference.problem.startswith("has another token at 0; 33% of the tokens of all rows")


def test_a_long_text_is_shortened_in_messages() -> None:
    rows = make_rows([[1]], columns=[["word\n" * 20]])
    assert rows.excerpt(0) == f"{'word ' * 8}…"


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), count=st.integers(1, 10))
def test_selected_rows_are_spread_from_the_shortest_to_the_longest(
    lengths: list[int], count: int
) -> None:
    records = TextRecords.from_lists([np.ones(length, np.int32) for length in lengths])
    indices = select_rows(records, ProbeTexts([], {}, ""), count)
    assert len(set(indices.tolist())) == len(indices) == min(count, len(lengths))
    selected = [lengths[index] for index in indices]
    assert selected == sorted(selected)
    assert selected[0] == min(lengths)
    assert count == 1 or len(lengths) == 1 or selected[-1] == max(lengths)
    if len(set(lengths)) >= count:
        assert len(set(selected)) == len(selected)


def test_the_shortest_text_of_a_length_is_selected() -> None:
    records = TextRecords.from_lists(random_ids(3, 5, min_length=5))
    probe = ProbeTexts([["a" * 90, "a", "a" * 50]], {}, "")
    assert select_rows(records, probe, 1).tolist() == [1]


def test_rows_of_tensors_may_all_be_equal_in_length() -> None:
    records = TensorRecords([np.zeros((20, 3), np.float32)])
    assert select_rows(records, ProbeTexts([], {}, ""), 8).tolist() == [0, 3, 5, 8, 11, 14, 16, 19]
