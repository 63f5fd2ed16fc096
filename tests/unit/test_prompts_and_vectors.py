"""Columns of texts with prompts, and columns of vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

from regauge.data.dataset import ColumnInfo, Dataset
from regauge.data.layouts import build_layout
from regauge.data.mixture import read_data_manifest
from regauge.data.settings import DataSettings, RowLayout
from regauge.system.errors import DataError, SettingsError
from regauge.tasks import Task
from regauge.tasks.classify import Classify
from regauge.tasks.contrastive import Contrastive
from regauge.tasks.distill import Distill
from regauge.tasks.similarity import Similarity
from regauge.tasks.triplet import Triplet
from tokenizer_families import draw_texts, write_tokenizer
from unit.preparing import WORDS, prepare_dataset

LIMIT, WIDTH = 12, 6
PROMPTS = ("query: ", "query:", "for river ", "sum")
"""With a blank at the end, without one, of words, and a start of a word."""


def write_records(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "a.jsonl").write_text(lines, encoding="utf-8")


@pytest.mark.parametrize("family", ["trained", "bert", "roberta", "t5"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_and_its_text_have_the_tokens_of_one_text(
    family: str, prompt: str, tmp_path: Path
) -> None:
    """sentence-transformers tokenizes the prompt and the text as one text, too."""
    folder = write_tokenizer(family, tmp_path / "tokenizer")
    texts = draw_texts(60)
    write_records(tmp_path, [{"text": text, "other": text} for text in texts])
    data = prepare_dataset(
        tmp_path,
        tokenizer={"path": str(folder), "vocab_size": 8192},
        rows={"layout": "fields", "fields": {"text": LIMIT, "other": LIMIT}}
        | {"prompts": {"text": prompt}},
        split={"near_duplicates": "keep", "similarity": 1.0},
    )
    assert data.manifest.columns["text"].prompt == prompt
    assert data.manifest.columns["other"].prompt == ""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"truncation": True, "max_length": LIMIT}
    expected = {
        name: sorted(tokenizer([before + text for text in texts], **options)["input_ids"])
        for name, before in (("text", prompt), ("other", ""))
    }
    rows = [
        row
        for split in ("train", "heldout")
        for row in data.rows(split).take(range(len(data.rows(split))))
    ]
    for name, ids in expected.items():
        assert sorted(row[name].tolist() for row in rows) == ids
    assert expected["text"] != expected["other"]
    assert max(len(ids) for ids in expected["text"]) == LIMIT
    stored_texts = data.read_texts("heldout")
    assert stored_texts
    assert all(record["text"] == record["other"] for record in stored_texts)


def test_prompts_and_vectors_are_for_records_alone() -> None:
    with pytest.raises(ValueError, match="'title' has a prompt and no limit in fields"):
        RowLayout(layout="fields", fields={"text": 8}, prompts={"title": "t: "})
    with pytest.raises(ValueError, match="layout 'packed' does not use 'prompts'; remove it"):
        RowLayout(prompts={"text": "t: "})
    with pytest.raises(ValueError, match="'text' is listed twice in rows"):
        RowLayout(layout="fields", fields={"text": 8}, vectors=("text",))
    groups = {"layout": "groups", "group_by": "text", "fields": {"text": 8}}
    with pytest.raises(ValueError, match="layout 'groups' does not use 'vectors'"):
        RowLayout.model_validate({**groups, "vectors": ("embedding",)})


def build_vector(number: int, width: int = WIDTH) -> list[float]:
    vector = np.random.default_rng(number).normal(size=width)
    return [float(value) for value in vector / np.linalg.norm(vector)]


def build_records(count: int) -> list[dict[str, Any]]:
    return [
        {"text": f"{WORDS[number]} {WORDS[number + 7]} word", "embedding": build_vector(number)}
        for number in range(count)
    ]


ROWS = {"layout": "fields", "fields": {"text": LIMIT}, "vectors": ["embedding"]}


def prepare_vectors(folder: Path, **changes: Any) -> Dataset:
    return prepare_dataset(folder, rows=ROWS, split={"heldout_fraction": 0.3}, **changes)


def read_vectors(data: Dataset) -> list[list[float]]:
    rows = [data.rows(split).take(range(len(data.rows(split)))) for split in ("train", "heldout")]
    return sorted(row["embedding"].tolist() for part in rows for row in part)


def test_vectors_are_stored_in_fp32(tmp_path: Path) -> None:
    records = build_records(40)
    write_records(tmp_path, records)
    data = prepare_vectors(tmp_path)
    expected = [np.float32(record["embedding"]).tolist() for record in records]
    assert read_vectors(data) == sorted(expected)
    column = data.manifest.columns["embedding"]
    assert (column.kind, column.max_length, column.max_group_size) == ("vector", WIDTH, 1)
    for split in ("train", "heldout"):
        assert column.ranges[split] == pytest.approx((1, 1), abs=1e-6)
    assert column.mean == pytest.approx(1, abs=1e-6)
    assert not sum(column.num_missing.values())


@pytest.mark.parametrize("dtype", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_vectors_of_parquet_files_are_read(
    tmp_path: Path,
    dtype: pa.DataType,
    is_fixed: bool,  # noqa: FBT001 - a case
) -> None:
    """`regauge predict` writes lists of a fixed size in half precision."""
    numpy_dtype = dtype.to_pandas_dtype()
    vectors = [np.array(build_vector(number), numpy_dtype) for number in range(20)]
    flat = pa.array(np.concatenate(vectors), dtype)
    embedding = (
        pa.FixedSizeListArray.from_arrays(flat, WIDTH)
        if is_fixed
        else pa.ListArray.from_arrays(np.arange(21, dtype=np.int32) * WIDTH, flat)
    )
    texts = [record["text"] for record in build_records(20)]
    table = pa.table({"text": texts, "embedding": embedding})
    pq.write_table(table, tmp_path / "a.parquet")
    source = {"kind": "parquet", "files": [str(tmp_path / "a.parquet")]}
    settings = {"source": source, "rows": ROWS, "split": {"heldout_fraction": 0.3}}
    base = {"data": {"path": str(tmp_path / "out")}, "tokenizer": {"vocab_size": 500}}
    from regauge import config
    from regauge.commands import prepare

    prepare.run(config.build(prepare.PrepareSettings, {**base, **settings}))
    data = Dataset(tmp_path / "out")
    assert read_vectors(data) == sorted(np.float32(vector).tolist() for vector in vectors)


def test_vectors_of_different_sizes_are_refused(tmp_path: Path) -> None:
    records = build_records(40)
    records[-1]["embedding"] = build_vector(0, WIDTH - 1)
    write_records(tmp_path, records)
    problem = f"the vectors of 'embedding' have {WIDTH} and {WIDTH - 1} numbers"
    with pytest.raises(DataError, match=f"{problem}|{WIDTH - 1} and {WIDTH} numbers"):
        prepare_vectors(tmp_path)


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (None, "NoneType None is not a list of numbers that are finite in fp32"),
        ("[1, 2]", "str [1, 2] is not a list of numbers that are finite in fp32"),
        ([1.0, "2"], "list [1.0, '2'] is not a list of numbers that are finite in fp32"),
        ([1.0, None], "list [1.0, None] is not"),
        ([[1.0]], "list [[1.0]] is not a list of numbers that are finite in fp32"),
        ([True, False], "list [True, False] is not a list of numbers that are finite in fp32"),
        ([], "list [] is not a list of numbers"),
        ([math.inf] * WIDTH, "inf] is not a list of numbers that are finite in fp32"),
        ([1e300] * WIDTH, "is not a list of numbers that are finite in fp32"),
        ([10**400] * WIDTH, "is not a list of numbers that are finite in fp32"),
    ],
)
def test_other_values_are_rejected(tmp_path: Path, value: Any, detail: str) -> None:
    records = build_records(40)
    records[5]["embedding"] = value
    write_records(tmp_path, records)
    data = prepare_vectors(tmp_path)
    assert data.manifest.skipped == {"no vector field 'embedding'": 1}
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert detail in json.loads(line)["detail"]


def test_a_dataset_of_another_prompt_or_size_cannot_be_mixed_in(tmp_path: Path) -> None:
    write_records(tmp_path, build_records(40))
    main = prepare_vectors(tmp_path)
    other_rows = {**ROWS, "prompts": {"text": "query: "}}
    tokenizer = {"path": str(main.folder / "tokenizer"), "vocab_size": 8192}
    prepare_dataset(tmp_path, "other", rows=other_rows, tokenizer=tokenizer)
    mixed = {"path": str(tmp_path / "other"), "fraction": 0.5}
    data = DataSettings.model_validate({"path": str(main.folder), "mix": (mixed,)})
    with pytest.raises(DataError, match=r"columns\.text\.prompt is 'query: ', not ''"):
        read_data_manifest(data)


def test_tasks_without_prompts_refuse_a_dataset_with_prompts(tmp_path: Path) -> None:
    records = [{**record, "label": 0} for record in build_records(40)]
    write_records(tmp_path, records)
    rows = {**ROWS, "integers": ["label"], "prompts": {"text": "topic: "}}
    data = prepare_dataset(tmp_path, rows=rows)
    problem = "task 'classify' cannot export the prompt of 'text'; prepare the dataset without"
    with pytest.raises(SettingsError, match=problem):
        Classify().check_dataset(data.manifest)
    Distill().check_dataset(data.manifest)


def change_columns(data: Dataset, **columns: ColumnInfo) -> Any:
    return data.manifest.model_copy(update={"columns": {**data.manifest.columns, **columns}})


def test_the_prompts_of_a_task_are_those_of_its_dataset(tmp_path: Path) -> None:
    records = [
        {"query": WORDS[number], "document": f"{WORDS[number]} text", "wrong": WORDS[number + 1]}
        for number in range(40)
    ]
    write_records(tmp_path, records)
    prompts = {"query": "q: ", "document": "d: ", "wrong": "d: "}
    rows = {"layout": "fields", "fields": dict.fromkeys(prompts, 12), "prompts": prompts}
    data = prepare_dataset(tmp_path, rows=rows, split={"similarity": 1.0})
    task = Contrastive(negatives=("wrong",))
    task.check_dataset(data.manifest)
    assert task.export_prompts(data.manifest) == {"query": "q: ", "document": "d: "}
    Contrastive(negatives=("wrong",), prompts={"query": "q: "}).check_dataset(data.manifest)
    with pytest.raises(SettingsError) as error:
        Contrastive(prompts={"query": "ask: "}).check_dataset(data.manifest)
    assert str(error.value) == (
        "the texts of 'query' have the prompt 'q: ', not 'ask: ';"
        ' prepare them with rows.prompts = { query = "ask: " }'
    )
    wrong = data.manifest.columns["wrong"].model_copy(update={"prompt": ""})
    with pytest.raises(SettingsError, match="'wrong' have the prompt '', not 'd: '"):
        task.check_dataset(change_columns(data, wrong=wrong))
    with pytest.raises(ValueError, match=r"no prompt 'qury'; did you mean 'query'\?"):
        Contrastive(prompts={"qury": "q: "})
    unknown = Contrastive(document="body")
    with pytest.raises(SettingsError, match="the dataset has no field 'body'"):
        unknown.check_dataset(data.manifest)


def test_vectors_that_the_model_cannot_equal_are_refused(tmp_path: Path) -> None:
    records = build_records(40)
    records[3]["embedding"] = [2 * value for value in records[3]["embedding"]]
    write_records(tmp_path, records)
    manifest = prepare_vectors(tmp_path).manifest
    problem = "'embedding' have lengths from 1 to 2, but the model returns vectors of length 1"
    with pytest.raises(DataError, match=problem):
        Distill().check_dataset(manifest)
    Distill(normalize=False).check_dataset(manifest)
    Distill(objective="cosine").check_dataset(manifest)
    with pytest.raises(SettingsError, match="field 'text' is not of type vector"):
        Distill(vector="text").check_dataset(manifest)


def test_the_size_of_vectors_is_unknown_before_they_are_read() -> None:
    layout = build_layout(RowLayout.model_validate({**ROWS, "vectors": ("embedding",)}))
    assert layout.describe_columns({})["embedding"].max_length == 0


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        (
            Contrastive(document=("a", "b"), negatives=("c",), prompts={"document": "d: "}),
            {
                "fields": dict.fromkeys(("query", "a", "b", "c"), 128),
                "prompts": {"a": "d: ", "b": "d: ", "c": "d: "},
            },
        ),
        (
            Triplet(prompts={"query": "q: ", "document": ""}),
            {
                "fields": dict.fromkeys(("anchor", "positive", "negative"), 128),
                "prompts": {"anchor": "q: ", "positive": "", "negative": ""},
            },
        ),
        (
            Similarity(label="grade"),
            {
                "fields": {"sentence1": 128, "sentence2": 128},
                "prompts": {},
                "floats": ["grade"],
            },
        ),
        (
            Distill(prompts={"text": "t: "}),
            {"fields": {"text": 128}, "prompts": {"text": "t: "}, "vectors": ["embedding"]},
        ),
    ],
    ids=["contrastive", "triplet", "similarity", "distill"],
)
def test_the_rows_follow_from_the_task(task: Task, rows: dict[str, Any]) -> None:
    defaults = task.default_rows()
    assert defaults == {"layout": "fields", **rows}
    RowLayout.model_validate({name: _as_tuple(value) for name, value in defaults.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
