"""Datasets of the Hugging Face hub: in a folder, or on a local stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem, constants

from regauge.commands import prepare as verb
from regauge.data.sources import _splits
from regauge.data.sources.huggingface import HuggingFace
from regauge.data.sources.parquet import Parquet
from regauge.system import object_store
from regauge.system.errors import DataError, RegaugeError, TransientError
from unit.hub import CONVERTED_SHA, SHA, TOKEN, serve_hub
from unit.preparing import build_settings, build_tables, prepare_dataset, write_corpus
from unit.reads import read_fields
from unit.web import Web

ROWS = [{"text": f"row {number}", "label": number % 2} for number in range(50)]


def save(folder: Path, rows: list[dict[str, Any]], split: str | None = None) -> None:
    """Write the files of `datasets.Dataset.save_to_disk` (5.2): Arrow streams and a JSON file."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        half = len(rows) // 2
        table = pa.Table.from_pylist(rows[number * half : (number + 1) * half])
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=10)
    state = {"_data_files": [{"filename": name} for name in names], "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "cache-0123.arrow").write_bytes(b"an internal file of the library")


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def catch_error(**settings: Any) -> RegaugeError:
    with pytest.raises(RegaugeError) as caught:
        HuggingFace(**settings).list_pieces()
    return caught.value


def test_a_saved_dataset_is_read_without_its_library(tmp_path: Path) -> None:
    save(tmp_path / "saved", ROWS)
    read = HuggingFace(name=str(tmp_path / "saved"))
    assert read_fields(read) == ROWS
    assert not read.remote_location()
    assert read_fields(HuggingFace(name=str(tmp_path / "saved"), columns=("label",)))[3] == {
        "label": 1
    }
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    assert "is missing; save the dataset again" in str(catch_error(name=str(tmp_path / "saved")))


def test_a_saved_dataset_has_its_splits(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        save(tmp_path / "saved" / split, rows, split)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    name = str(tmp_path / "saved")
    assert read_fields(HuggingFace(name=name, split="test")) == ROWS[30:]
    assert read_fields(HuggingFace(name=name)) == ROWS[:30]
    assert "no split 'tst'; did you mean 'test'?" in str(catch_error(name=name, split="tst"))
    alone = catch_error(name=str(tmp_path / "saved" / "test"))
    assert "it is the split 'test'; set source.split = 'test'" in str(alone)


def test_file_names_define_the_splits_of_a_folder(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:10])
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[10:20])
    parquet(tmp_path / "data" / "test_long-00000-of-00001.parquet", ROWS[20:])
    (tmp_path / "README.md").write_text("# About")
    assert read_fields(HuggingFace(name=str(tmp_path))) == ROWS[:20]
    assert read_fields(HuggingFace(name=str(tmp_path), split="test_long")) == ROWS[20:]
    error = catch_error(name=str(tmp_path), split="test")
    assert "no split 'test'; did you mean 'test_long'?" in str(error)


def test_the_readme_defines_the_subsets_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: long\n  data_files: long/*.jsonl\n"
        "- config_name: deep\n  data_dir: long/deep\n"
        "- config_name: short\n  data_files:\n  - split: train\n    path: [./short/a*.jsonl]\n"
        "  - split: test\n    path: short/b.jsonl\n---\n# About\n"
    )
    for name in ("long/a", "long/deep/a", "short/a1", "short/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")

    def texts(**more: str) -> list[Any]:
        return [row["text"] for row in read_fields(HuggingFace(name=str(tmp_path), **more))]

    assert texts(subset="long") == ["long/a"]
    assert texts(subset="deep") == ["long/deep/a"]
    assert texts(subset="short") == ["short/a1"]
    assert texts(subset="short", split="test") == ["short/b"]
    assert "3 subsets: deep, long, short; set source.subset" in str(catch_error(name=str(tmp_path)))
    assert "did you mean 'short'?" in str(catch_error(name=str(tmp_path), subset="shrt"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.csv", "train"),
        ("my-dev-set.jsonl.gz", "validation"),
        ("eval/part1.parquet", "test"),
        ("data/train_sft-00001-of-00003.parquet", "train_sft"),
        ("contest.txt", ""),
        ("latest/trainers.jsonl", ""),
    ],
)
def test_whole_words_of_a_name_define_its_split(name: str, split: str) -> None:
    assert _splits._find_split(name) == split


def test_files_without_a_split_are_training_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / ".hidden.txt").write_text("three")
    assert read_fields(HuggingFace(name=str(tmp_path))) == [{"text": "one"}, {"text": "two"}]
    (tmp_path / "b.csv").write_text("text\nfour\n")
    assert "files of csv and text; choose one format" in str(catch_error(name=str(tmp_path)))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "it has no data file in a known format" in str(catch_error(name=str(empty)))


def test_settings_that_a_folder_does_not_support_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved", ROWS)
    name = str(tmp_path / "saved")
    assert "remove source.revision" in str(catch_error(name=name, revision="v1"))
    assert "remove source.subset" in str(catch_error(name=name, subset="en"))
    (tmp_path / "saved" / "state.json").write_text('{"_split": null}')
    assert "has no '_data_files'; save the dataset again" in str(catch_error(name=name))
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "is not valid YAML" in str(catch_error(name=str(tmp_path)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    with serve_hub(tmp_path / "hub") as web:
        template = web.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", web.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN_PATH", "/none")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(object_store, "MIN_WAIT_SECONDS", 0.01)
        HfFileSystem.clear_instance_cache()
        yield web


def test_a_dataset_of_the_hub_is_streamed(hub: Web) -> None:
    folder = hub.folder / "org" / "rows"
    parquet(folder / "data" / "train-00000-of-00001.parquet", ROWS)
    (folder / "notes.txt").write_text("no data of any split")
    read = HuggingFace(name="org/rows")
    assert read_fields(read) == ROWS
    (piece,) = read.list_pieces()
    assert piece.files[0].startswith(f"hf://datasets/org/rows@{SHA}/data/train")
    before = piece.stamp
    parquet(folder / "data" / "train-00000-of-00001.parquet", ROWS[:-1])
    assert read.list_pieces()[0].stamp != before


def test_class_names_in_the_card_of_the_hub_are_read_once(hub: Web) -> None:
    folder = hub.folder / "org" / "rows"
    folder.mkdir(parents=True)
    for name in ("train-a", "train-b"):
        (folder / f"{name}.csv").write_text("text,label\none,0\n")
    label = {"name": "label", "dtype": {"class_label": {"names": {"0": "no", "1": "yes"}}}}
    (folder / ".card.json").write_text(json.dumps({"dataset_info": {"features": [label]}}))
    read = HuggingFace(name="org/rows")
    for piece in (*read.list_pieces(), *read.list_pieces()):
        assert read.class_names(piece) == {"label": ("no", "yes")}
    assert len([request for request in hub.requests if f"/{SHA}?blobs" in request]) == 1


def test_a_file_of_the_hub_has_a_url(hub: Web) -> None:
    folder = hub.folder / "org" / "rows"
    parquet(folder / "data" / "a.parquet", ROWS[:30])
    parquet(folder / "data" / "b.parquet", ROWS[30:])
    assert read_fields(Parquet(files=("hf://datasets/org/rows/data/*.parquet",))) == ROWS
    assert read_fields(Parquet(files=("hf://datasets/org/rows/data/b.parquet",))) == ROWS[30:]
    for name in ("data/*.parquet", "a.parquet"):  # may be private
        with pytest.raises(DataError, match=r"access to .*none/.* denied: .*; run 'hf auth login'"):
            Parquet(files=(f"hf://datasets/org/none/{name}",)).list_pieces()
    with pytest.raises(DataError, match=r"no file hf://datasets/org/rows/none.parquet"):
        Parquet(files=("hf://datasets/org/rows/none.parquet",)).list_pieces()
    with pytest.raises(DataError, match="no file matches"):
        Parquet(files=("hf://datasets/org/rows/data/*.csv",)).list_pieces()


def test_converted_files_are_read_if_no_other_file_is_readable(hub: Web) -> None:
    folder = hub.folder / "org" / "odd"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.tar").write_bytes(b"no rows")
    assert "it has no data file in a known format" in str(catch_error(name="org/odd"))
    parquet(folder / ".converted" / "default" / "partial-train" / "0000.parquet", ROWS)
    parquet(folder / ".converted" / "default" / "test" / "0000.parquet", ROWS[:5])
    read = HuggingFace(name="org/odd")
    assert read_fields(read) == ROWS
    (piece,) = read.list_pieces()
    root = f"hf://datasets/org/odd@{CONVERTED_SHA}"
    assert piece.files == (f"{root}/default/partial-train/0000.parquet",)


def test_a_gated_dataset_needs_a_token(hub: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.folder / "org" / "gated").mkdir(parents=True)
    (hub.folder / "org" / "gated" / "train.jsonl").write_text('{"text": "secret"}\n')
    error = catch_error(name="org/gated")
    assert error.problem == "the dataset 'org/gated': it is gated"
    assert error.remedy == (
        f"accept its conditions at {hub.url}/datasets/org/gated, then run 'hf auth login', or "
        "set HF_TOKEN"
    )
    assert error.exit_code == 64
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read_fields(HuggingFace(name="org/gated")) == [{"text": "secret"}]


def test_unknown_names_on_the_hub_are_reported(hub: Web) -> None:
    folder = hub.folder / "org" / "rows"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"text": "one"}\n')
    missing = catch_error(name="org/none")
    assert f"not a folder and not a dataset that is visible on {hub.url}" in missing.problem
    assert "hf auth login" in missing.remedy
    assert "not a folder and not a valid name on the hub" in str(catch_error(name="./no/folder"))
    assert "it has no revision 'v9'" in str(catch_error(name="org/rows", revision="v9"))
    assert "did you mean 'train'?" in str(catch_error(name="org/rows", split="trian"))
    configs = [{"config_name": name, "data_files": "*.jsonl"} for name in ("de", "fr")]
    (folder / ".card.json").write_text(json.dumps({"configs": configs}))
    assert "2 subsets: de, fr" in str(catch_error(name="org/rows"))
    assert read_fields(HuggingFace(name="org/rows", subset="fr")) == [{"text": "one"}]


def test_an_unreachable_hub_is_reported(hub: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.status = 400
    assert isinstance(catch_error(name="org/rows"), TransientError)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = catch_error(name="org/rows")
    assert error.exit_code == 75
    assert "cannot read from http://127.0.0.1:9" in error.problem
    assert "HF_ENDPOINT" in error.remedy


def test_a_dry_run_does_not_contact_the_hub(tmp_path: Path) -> None:
    answer = verb.plan(build_settings(tmp_path, source={"kind": "huggingface", "name": "org/rows"}))
    assert answer["action"] == "read the dataset 'org/rows' of the hub and prepare the dataset"


def test_the_command_prepares_a_dataset_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "org" / "texts"
    (folder / "data").mkdir(parents=True)
    for number in range(2):
        write_corpus(folder / "data" / f"train-{number:05d}-of-00002.jsonl", 300 + number)
    folder_source = {"kind": "huggingface", "name": str(folder)}
    hub_source = {"kind": "huggingface", "name": "org/texts"}
    local = prepare_dataset(tmp_path, "local", source=folder_source)
    run = build_tables(tmp_path, "remote", source=hub_source, prepare={"processes": 2})
    (tmp_path / "run.json").write_text(json.dumps(run))
    with serve_hub(tmp_path / "hub") as web:
        process = subprocess.run(
            [sys.executable, "-m", "regauge", "prepare", str(tmp_path / "run.json"), "--json"],
            env={**os.environ, "HF_ENDPOINT": web.url, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=True,
        )
    splits = json.loads((tmp_path / "remote" / "manifest.json").read_text())["splits"]
    assert splits == json.loads(local.manifest.model_dump_json())["splits"]
    assert json.loads(process.stdout)["train_rows"] == local.manifest.splits["train"].rows


def test_an_unknown_field_of_a_split_gets_a_suggestion(tmp_path: Path) -> None:
    save(tmp_path / "saved", ROWS)
    with pytest.raises(DataError, match=r"has no column 'txt'; did you mean 'text'\?"):
        HuggingFace(name=str(tmp_path / "saved"), columns=("txt",)).list_pieces()
