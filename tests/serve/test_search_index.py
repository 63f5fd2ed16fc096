"""The search over the vectors of `predict`: exact results, approximate ones, and refusals."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regauge
from end_to_end.predicting import export_run, random_texts, train_model, write_records
from regauge.cli import main
from regauge.inference.export.artifact import Artifact, open_artifact
from regauge.inference.export.manifest import Dtype
from regauge.inference.export.postprocess import convert_vectors, restore_vectors
from regauge.serving.search import search_rows
from regauge.serving.search.search_index import SearchIndex, find_address
from regauge.serving.search.search_settings import SearchSettings
from regauge.system.errors import DataError, RegaugeError, SettingsError
from serve.vectors import Kept, build_artifact, write_vectors

WIDTH, ROWS = 24, 500
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "int8", "binary")


def draw_vectors(count: int, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, width), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return build_artifact(tmp_path / "artifact", WIDTH)


def open_index(
    folder: Path, artifact: Artifact, vectors: np.ndarray, kept: Kept | None = None, **options: Any
) -> SearchIndex:
    """Write vectors as `predict` does and open their index."""
    write_vectors(folder, artifact, vectors, kept)
    return SearchIndex.open(SearchSettings(vectors=str(folder), **options), artifact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_rows", [7, 1024])
def test_the_exact_search_returns_the_highest_dot_products(
    tmp_path: Path,
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Dtype,
    block_rows: int,
) -> None:
    monkeypatch.setattr(search_rows, "BLOCK_ROWS", block_rows)
    vectors, query = draw_vectors(ROWS), draw_vectors(1, seed=1)[0]
    write_vectors(tmp_path / "out", artifact, vectors, dtype=dtype)
    columns = convert_vectors(vectors, dtype)
    stored, scale = np.asarray(columns["embedding"]), columns.get("scale")
    restored = restore_vectors(stored, dtype, WIDTH, None if scale is None else np.asarray(scale))
    expected = np.argsort(-(restored @ query), kind="stable")[:20]
    settings = SearchSettings(vectors=str(tmp_path / "out"))
    with SearchIndex.open(settings, artifact) as index:
        assert len(index) == ROWS
        assert index.is_exact
        numbers, scores = index.rank_rows(query, 20)
    if dtype == "binary":  # several rows have the same signs at the same positions
        assert np.allclose(np.sort(scores), np.sort((restored @ query)[expected]), atol=1e-6)
    else:
        assert numbers.tolist() == expected.tolist()
    assert np.allclose(scores, (restored @ query)[numbers], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_restored_vectors_have_the_direction_of_the_original_ones(dtype: Dtype) -> None:
    vectors = draw_vectors(50, 250)
    columns = convert_vectors(vectors, dtype)
    scale = columns.get("scale")
    restored = restore_vectors(
        np.asarray(columns["embedding"]), dtype, 250, None if scale is None else np.asarray(scale)
    )
    assert restored.dtype == np.float32
    cosines = (restored * vectors).sum(1) / np.linalg.norm(restored, axis=1)
    assert cosines.min() > (0.7 if dtype == "binary" else 0.999)
    assert np.allclose(np.linalg.norm(restored, axis=1), 1, atol=1e-2)


def test_equal_scores_are_in_the_order_of_the_rows(tmp_path: Path, artifact: Artifact) -> None:
    vectors = np.repeat(draw_vectors(3), 100, axis=0)
    query = vectors[150]
    with open_index(tmp_path / "out", artifact, vectors) as index:
        assert index.rank_rows(query, 5).numbers.tolist() == [100, 101, 102, 103, 104]


def test_vectors_with_undefined_numbers_are_never_results(
    tmp_path: Path, artifact: Artifact
) -> None:
    vectors = draw_vectors(30)
    vectors[3], vectors[4] = np.nan, np.inf
    with open_index(tmp_path / "out", artifact, vectors) as index:
        numbers = index.rank_rows(np.abs(vectors[0]), 100).numbers.tolist()
    assert sorted(numbers) == sorted({*range(30)} - {3, 4})


def test_more_results_than_rows_are_all_rows(tmp_path: Path, artifact: Artifact) -> None:
    with open_index(tmp_path / "out", artifact, draw_vectors(3)) as index:
        assert [result["rank"] for result in index.search(draw_vectors(1)[0], 10)] == [1, 2, 3]


def test_results_have_titles_links_and_texts(tmp_path: Path, artifact: Artifact) -> None:
    vectors = draw_vectors(4)
    kept: Kept = {
        "name": ["json.dumps", "", None, "x" * 300],
        "url": ["https://example.org/a", "javascript:alert(1)", None, "http://example.org"],
        "text": ["Serialize.", "\n First  line \nsecond", None, "y" * 900],
        "stars": [1, 2, None, 4],
    }
    write_vectors(tmp_path / "out", artifact, vectors, kept, kinds={"stars": "integer"})
    settings = SearchSettings(vectors=str(tmp_path / "out"), max_text_characters=10)
    with SearchIndex.open(settings, artifact) as index:
        first, second, third, fourth = (index.search(vector, 1)[0] for vector in vectors)
        row = index.read_row(0)
        with pytest.raises(IndexError):
            index.read_row(4)
    assert first == {
        "rank": 1,
        "score": 1.0,
        "id": 0,
        "title": "json.dumps",
        "link": "https://example.org/a",
        "texts": {"text": "Serialize."},
    }
    assert (second["title"], second["link"]) == ("First line", None)
    assert (third["title"], third["texts"]) == ("Row 2", {})
    assert fourth["title"] == "x" * 120 + "…"
    assert fourth["texts"] == {"text": "y" * 10 + "…"}
    assert row["fields"] == {name: values[0] for name, values in kept.items()}


def test_fields_of_the_settings_replace_the_default_ones(
    tmp_path: Path, artifact: Artifact
) -> None:
    kept: Kept = {"name": ["a"], "page": ["https://example.org"], "text": ["b"], "stars": ["5"]}
    fields = {"title_field": "stars", "link_field": "page", "text_fields": ("name",)}
    with open_index(tmp_path / "out", artifact, draw_vectors(1), kept, **fields) as index:
        [result] = index.search(draw_vectors(1)[0], 1)
    assert (result["title"], result["link"]) == ("5", "https://example.org")
    assert result["texts"] == {"name": "a"}


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("https://example.org/a?b=c#d", "https://example.org/a?b=c#d"),
        (" http://example.org ", "http://example.org"),
        ("HTTPS://example.org", "HTTPS://example.org"),
        ("javascript:alert(1)", None),
        ("javascript://example.org/%0aalert(1)", None),
        ("data:text/html,x", None),
        ("https:", None),
        ("//example.org", None),
        ("/etc/passwd", None),
        ("https://[", None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_only_addresses_of_the_web_are_links(value: object, address: str | None) -> None:
    assert find_address(value) == address


def draw_clusters(count: int, seed: int = 0) -> np.ndarray:
    """Return vectors of length 1 around 200 centers, as those of texts with topics."""
    centers = draw_vectors(200)
    draw = np.random.default_rng(seed)
    noise = 0.15 * draw.standard_normal((count, WIDTH), np.float32)
    vectors = centers[draw.integers(0, len(centers), count)] + noise
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_approximate_search_finds_the_exact_results(tmp_path: Path, artifact: Artifact) -> None:
    vectors, queries = draw_clusters(20_000), draw_clusters(100, seed=1)
    folder = write_vectors(tmp_path / "out", artifact, vectors, shard_rows=9000)
    base = SearchSettings(vectors=str(folder), min_approximate_rows=20_000, probes=16)
    never = base.model_copy(update={"approximate": "never"})
    with SearchIndex.open(base, artifact) as index, SearchIndex.open(never, artifact) as exact:
        assert (index.is_exact, exact.is_exact) == (False, True)
        shares = []
        for query in queries:
            numbers, scores = index.rank_rows(query, 10)
            expected = exact.rank_rows(query, 10)
            shares.append(len({*numbers.tolist()} & {*expected.numbers.tolist()}) / 10)
            assert np.allclose(scores, vectors[numbers] @ query, atol=1e-6)
            assert (np.diff(scores) <= 0).all()
    assert np.mean(shares) > 0.97


def test_fewer_rows_or_no_faiss_need_no_approximate_index(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(100))
    settings = SearchSettings(vectors=str(folder), min_approximate_rows=101)
    with SearchIndex.open(settings, artifact) as index:
        assert index.is_exact
    monkeypatch.setitem(sys.modules, "faiss", None)
    settings = SearchSettings(vectors=str(folder), min_approximate_rows=100)
    with SearchIndex.open(settings, artifact) as index:
        assert index.is_exact


def list_derived_files(folder: Path) -> dict[str, int]:
    return {path.suffix: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_derived_files_are_written_once_and_replaced_with_the_vectors(
    tmp_path: Path, artifact: Artifact
) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(100))
    settings = SearchSettings(vectors=str(folder), min_approximate_rows=50)
    SearchIndex.open(settings, artifact).close()
    before = list_derived_files(folder / "search")
    assert before.keys() == {".arrow", ".faiss"}
    SearchIndex.open(settings, artifact).close()
    assert list_derived_files(folder / "search") == before
    others = write_vectors(tmp_path / "others", artifact, draw_vectors(60, seed=1))
    (folder / "search").rename(others / "search")
    settings = SearchSettings(vectors=str(others), min_approximate_rows=50)
    with SearchIndex.open(settings, artifact) as index:
        assert len(index) == 60
    after = list_derived_files(others / "search")
    assert after.keys() == before.keys()
    assert all(after[suffix] != before[suffix] for suffix in before)


def test_derived_files_can_have_a_folder_that_keeps_its_other_files(
    tmp_path: Path, artifact: Artifact
) -> None:
    other = tmp_path / "index" / "mine.arrow"
    other.parent.mkdir()
    other.write_text("mine")
    folder = str(other.parent)
    with open_index(tmp_path / "out", artifact, draw_vectors(5), index_folder=folder) as index:
        assert len(index) == 5
    assert other.read_text() == "mine"
    assert len(list(other.parent.iterdir())) == 2
    assert not (tmp_path / "out" / "search").exists()


def refuse(folder: Path, artifact: Artifact, **options: Any) -> RegaugeError:
    with pytest.raises(RegaugeError) as caught:
        SearchIndex.open(SearchSettings(vectors=str(folder), **options), artifact)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_vectors_of_another_artifact_are_refused(tmp_path: Path, artifact: Artifact) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(5))
    other = build_artifact(tmp_path / "other", WIDTH)
    error = refuse(folder, other)
    assert isinstance(error, SettingsError)
    assert f"{folder} has vectors from another artifact than {other.folder}" in str(error)
    assert not (folder / "search").exists()
    settings = SearchSettings(vectors=str(folder), allow_other_artifact=True)
    with SearchIndex.open(settings, other) as index:
        assert len(index) == 5
    narrow = build_artifact(tmp_path / "narrow", WIDTH - 8)
    error = refuse(folder, narrow, allow_other_artifact=True)
    assert "the vectors have 24 elements, but the model's have 16" in str(error)


def test_an_artifact_without_vectors_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(5))
    classifier = build_artifact(tmp_path / "classifier", 3, "classes")
    assert "classifier returns classes, not vectors" in str(refuse(folder, classifier))


@pytest.mark.parametrize("file_format", ["npy", "jsonl", "csv"])
def test_other_formats_than_parquet_are_refused(
    tmp_path: Path, artifact: Artifact, file_format: str
) -> None:
    kept: Kept = {"name": list("abcde")}
    folder = tmp_path / "out"
    write_vectors(folder, artifact, draw_vectors(5), kept, file_format=file_format)
    message = f"has files of the format {file_format}; search needs predict with output.format"
    assert message in str(refuse(folder, artifact))


@pytest.mark.parametrize("key", ["title_field", "link_field", "text_fields"])
def test_fields_that_were_not_kept_are_refused(
    tmp_path: Path, artifact: Artifact, key: str
) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(1), {"summary": ["a"]})
    value = ("sumary",) if key == "text_fields" else "sumary"
    error = refuse(folder, artifact, **{key: value})
    assert "the vectors do not have a field 'sumary'" in str(error)
    assert "'summary'" in error.remedy


def test_folders_without_vectors_are_refused(tmp_path: Path, artifact: Artifact) -> None:
    assert "job.json is missing; name the output folder" in str(refuse(tmp_path / "no", artifact))
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(0), is_finished=False)
    assert "no finished shard with rows" in str(refuse(folder, artifact))
    (folder / "job.json").write_text("{")
    assert isinstance(refuse(folder, artifact), DataError)


def test_damaged_files_are_refused(tmp_path: Path, artifact: Artifact) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(5))
    [shard] = (folder / "shards").iterdir()
    content = shard.read_bytes()
    for damaged in (content[:4] + bytes(len(content) - 4), bytes(400) + content[400:]):
        shard.write_bytes(damaged)
        assert f"{shard} cannot be read" in str(refuse(folder, artifact))
        assert not list((folder / "search").iterdir())
    shard.write_bytes(content)
    SearchIndex.open(SearchSettings(vectors=str(folder)), artifact).close()
    [derived] = (folder / "search").iterdir()
    os.truncate(derived, derived.stat().st_size // 2)
    error = refuse(folder, artifact)
    assert (f"{derived} is damaged" in str(error), error.remedy) == (True, "remove it")


def test_an_unfinished_job_is_searched_with_a_warning(
    tmp_path: Path, artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_vectors(tmp_path / "out", artifact, draw_vectors(200), is_finished=False)
    (folder / "shards" / "000000-00001.parquet").unlink()
    with SearchIndex.open(SearchSettings(vectors=str(folder)), artifact) as index:
        assert len(index) == 100
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "its job is not finished; searching 100 rows" in warnings[0].getMessage()


@pytest.mark.parametrize("dtype", DTYPES)
def test_texts_are_found_by_the_artifact_that_embedded_them(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, dtype: Dtype
) -> None:
    """The whole path with a real model: train, export, predict, search."""
    base = tmp_path_factory.getbasetemp() / "search-model"
    if not base.exists():
        export_run(train_model(base), base / "artifact")
    source = write_records(tmp_path / "texts.jsonl", 300)
    options = ["--source", str(source), "--to", str(tmp_path / "out"), f"output.dtype={dtype}"]
    command = ["predict", str(base / "artifact"), "execution.executor=inline", *options]
    assert main([*command, "predict.shard_records=70"]) == 0
    settings = SearchSettings(vectors=str(tmp_path / "out"))
    model = regauge.load(base / "artifact")
    texts = random_texts(300)
    with SearchIndex.open(settings, open_artifact(base / "artifact")) as index:
        for number in (0, 69, 70, 299):
            results = index.search(model.encode(texts[number]), 3)
            rows = [index.read_row(result["id"])["fields"]["id"] for result in results]
            assert texts[number] in [texts[row] for row in rows]
            assert rows == [result["id"] for result in results]
    assert main([*command, "predict.shard_records=70"]) == 0, "the folder is still that of a job"
