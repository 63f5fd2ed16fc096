"""Defaults of `prepare` that follow from other tables: rows of the task, tokenizer of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regauge.cli import main
from regauge.commands import prepare as verb
from regauge.commands._parts.default_tables import complete_tables
from regauge.commands._parts.train_plan import read_dataset_rows
from regauge.config import build
from regauge.data.dataset import Dataset
from regauge.data.prepare.dataset_build import DatasetBuild
from regauge.data.settings import UNNAMED
from regauge.system.errors import DataError, SettingsError
from unit.preparing import WORDS, build_tables, prepare_dataset, read_contents, write_corpus

SOURCE: dict[str, Any] = {
    "source": {"kind": "jsonl", "files": ["a.jsonl"]},
    "data": {"path": "out"},
}


def build_settings(tables: dict[str, Any]) -> verb.PrepareSettings:
    return build(verb.PrepareSettings, tables, ("task", "model"))


def build_rows(**tables: Any) -> dict[str, Any]:
    """Return the rows of the settings of `prepare`, without the keys that are not set."""
    settings = build_settings({**SOURCE, **tables})
    return settings.rows[UNNAMED].model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("mlm", {}),
        ({"kind": "clm"}, {}),
        ({"kind": "mlm", "next_sentence": True}, {"layout": "sentence-pairs"}),
        (
            {"kind": "classify", "label": "topic"},
            {"layout": "fields", "fields": {"text": 128}, "labels": {"topic": ()}},
        ),
        (
            {"kind": "classify", "text_fields": ["a", "b"], "class_names": ["no", "yes"]},
            {
                "layout": "fields",
                "fields": {"a": 128, "b": 128},
                "labels": {"label": ("no", "yes")},
            },
        ),
        (
            {"kind": "classify", "problem_type": "regression"},
            {"layout": "fields", "fields": {"text": 128}, "floats": ("label",)},
        ),
        ("contrastive", {"layout": "fields", "fields": {"query": 128, "document": 128}}),
        (
            {"kind": "rank", "numeric_features": ["price"], "categorical_features": ["brand"]},
            {
                "layout": "groups",
                "group_by": "query",
                "fields": {"query": 128, "document": 128},
                "shared": ("query",),
                "floats": ("label", "price"),
                "categories": ("brand",),
            },
        ),
        (
            [{"name": "words", "kind": "contrastive", "weight": 2}],
            {"layout": "fields", "fields": {"query": 128, "document": 128}},
        ),
        ([{"name": "a", "kind": "contrastive"}, {"name": "b", "kind": "mlm"}], {}),
    ],
)
def test_the_rows_follow_from_the_task(task: Any, rows: dict[str, Any]) -> None:
    assert build_rows(task=task) == rows


def test_keys_of_rows_replace_those_of_the_task() -> None:
    task = {"kind": "classify", "label": "topic"}
    rows = build_rows(task=task, rows={"fields": {"text": 32}})
    assert rows == {"layout": "fields", "fields": {"text": 32}, "labels": {"topic": ()}}
    assert build_rows(task="sft", rows={"chat_template": "chatml"})["layout"] == "chat"


def test_nothing_follows_from_the_task_if_there_is_a_layout() -> None:
    fields = {"layout": "fields", "fields": {"text": 32}}
    assert build_rows(task="classify", rows=fields) == fields
    by_name = {"words": {"length": 64}, "texts": fields}
    settings = build_settings({**SOURCE, "task": "classify", "rows": by_name})
    assert [rows.layout for rows in settings.rows.values()] == ["packed", "fields"]


def test_records_of_a_query_are_in_one_split() -> None:
    settings = build_settings({**SOURCE, "task": "rank"})
    assert settings.split.group_by == "query"


def test_an_unknown_key_of_the_task_is_refused() -> None:
    with pytest.raises(SettingsError, match="unknown key 'lable'; did you mean 'label'"):
        build_settings({**SOURCE, "task": {"kind": "classify", "lable": "x"}})


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"model": {"path": "out/bert"}}, "out/bert"),
        ({"model": {"init_from": {"path": "out/run"}}}, "out/run"),
        ({"model": {"architecture": "bert"}}, None),
        ({"model": {"path": "out/bert"}, "tokenizer": {"vocab_size": 500}}, None),
        ({"model": {"path": "out/bert"}, "tokenizer": {"path": "out/other"}}, "out/other"),
    ],
)
def test_the_tokenizer_is_that_of_the_model(tables: dict[str, Any], path: str | None) -> None:
    assert build_settings({**SOURCE, **tables}).tokenizer.path == path


def test_completed_tables_are_complete() -> None:
    tables = {**SOURCE, "task": "rank", "model": {"path": "x"}, "validation": {"source": {}}}
    completed = complete_tables(tables)
    assert complete_tables(completed) == completed
    assert "rows" not in tables, "the tables of the caller are not changed"


def write_labels(folder: Path) -> None:
    lines = [
        json.dumps({"text": " ".join(WORDS[index : index + 9]), "label": WORDS[index % 2]}) + "\n"
        for index in range(0, 900, 9)
    ]
    (folder / "a.jsonl").write_text("".join(lines))


def test_a_classifier_needs_no_rows(tmp_path: Path) -> None:
    write_labels(tmp_path)
    tables = {**build_tables(tmp_path), "task": "classify"}
    del tables["rows"]
    verb.run(build_settings(tables))
    data = Dataset(tmp_path / "out")
    assert data.manifest.columns["label"].class_names == tuple(sorted(WORDS[:2]))
    rows = {"layout": "fields", "fields": {"text": 128}, "labels": ["label"]}
    same = prepare_dataset(tmp_path, "same", rows=rows)
    assert same.manifest.fingerprint == data.manifest.fingerprint


def test_class_names_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    write_labels(tmp_path)
    names = sorted(WORDS[:2])
    fingerprints = []
    for number, class_names in enumerate((names, [*names, "zebra"])):
        task = {"kind": "classify", "class_names": class_names}
        tables = {
            **build_tables(tmp_path),
            "task": task,
            "data": {"path": str(tmp_path / str(number))},
        }
        del tables["rows"]
        verb.run(build_settings(tables))
        fingerprints.append(Dataset(tmp_path / str(number)).manifest.fingerprint)
    assert fingerprints[0] != fingerprints[1]


def test_a_dry_run_of_training_knows_the_rows_of_the_task(tmp_path: Path) -> None:
    from regauge.training.settings import TrainSettings

    task = {"kind": "classify", "class_names": ["a", "b"]}
    run = {"model": {"architecture": "bert"}, "batch": {"rows": 8, "microbatch_rows": 8}}
    output = {"output": {"folder": "run"}, "stop": {"steps": 1}}
    tables = {**build_tables(tmp_path), "task": task, **run, **output}
    del tables["rows"]
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps(tables))
    names = set(TrainSettings.model_fields)
    settings = build(TrainSettings, {key: tables[key] for key in tables if key in names})
    (rows,) = read_dataset_rows(settings, run_file, ()).values()
    assert (rows.layout, rows.labels) == ("fields", {"label": ("a", "b")})


@pytest.mark.parametrize("part", ["tokenizer", ""])
def test_the_tokenizer_of_a_folder_is_found(tmp_path: Path, part: str) -> None:
    write_corpus(tmp_path / "a.jsonl", 60)
    first = prepare_dataset(tmp_path, "first")
    path = str(first.folder / part)
    second = prepare_dataset(tmp_path, "second", tokenizer={"path": path})
    assert second.manifest.tokenizer == first.manifest.tokenizer
    assert second.manifest.settings["tokenizer"]["path"] == path
    (first.folder / "tokenizer").rename(tmp_path / "model")
    third = prepare_dataset(tmp_path, "third", tokenizer={"path": str(tmp_path)})
    assert third.manifest.tokenizer == first.manifest.tokenizer


def test_a_dataset_is_replaced_on_request(tmp_path: Path, capsys: Any) -> None:
    write_corpus(tmp_path / "a.jsonl", 60)
    first = prepare_dataset(tmp_path).manifest.fingerprint
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps(build_tables(tmp_path, rows={"length": 32})))
    command = ["prepare", str(run_file)]
    assert main(command) == 64
    assert (
        "or replace the dataset with --overwrite (in Python: overwrite=True)"
        in capsys.readouterr().err
    )
    assert main([*command, "--overwrite", "--dry-run"]) == 0
    assert "action: replace the dataset" in capsys.readouterr().out
    assert Dataset(tmp_path / "out").manifest.fingerprint == first
    assert main([*command, "--overwrite"]) == 0
    assert Dataset(tmp_path / "out").manifest.columns["tokens"].max_length == 32
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out", "run.json"}


def test_an_unfinished_replacement_keeps_the_dataset(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 60)
    before = read_contents(prepare_dataset(tmp_path).folder)
    fields = {"layout": "fields", "fields": {"text": 16}, "integers": ["title"]}
    tables = build_tables(tmp_path, rows=fields)
    with pytest.raises(DataError, match="most records are rejected"):
        verb.run(build_settings(tables), overwrite=True)
    assert read_contents(tmp_path / "out") == before


@pytest.mark.parametrize("file", ["notes.txt", "tokenizer.txt", "words/notes.txt", "train.arrow"])
def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path, file: str) -> None:
    write_corpus(tmp_path / "a.jsonl", 60)
    tables = build_tables(tmp_path)
    if "/" in file:
        tables["rows"] = {"words": {"length": 32}}
    verb.run(build_settings(tables))
    folder = tmp_path / "out"
    (folder / file).write_text("mine")
    before = read_contents(folder)
    with pytest.raises(
        DataError, match=rf"has files that are not part of a dataset \({file}\); choose"
    ):
        verb.run(build_settings(build_tables(tmp_path)), overwrite=True)
    assert read_contents(folder) == before
    assert not (tmp_path / "out.partial").exists(), "it is refused before the work"


def test_a_file_that_appears_during_the_work_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "a.jsonl", 60)
    data = prepare_dataset(tmp_path)
    build_dataset = DatasetBuild.build

    def build_and_write(*arguments: Any) -> Any:
        (data.folder / "notes.txt").write_text("mine")
        return build_dataset(*arguments)

    monkeypatch.setattr(DatasetBuild, "build", build_and_write)
    settings = build_settings(build_tables(tmp_path, rows={"length": 32}))
    with pytest.raises(DataError, match=r"has files that are not part of a dataset \(notes\.txt\)"):
        verb.run(settings, overwrite=True)
    assert (data.folder / "notes.txt").read_text() == "mine"
    assert Dataset(data.folder).manifest == data.manifest


def test_a_file_or_another_folder_is_not_replaced(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 60)
    settings = build_settings(build_tables(tmp_path))
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DataError, match=r"has files that are not part of a dataset \(out\)"):
        verb.run(settings, overwrite=True)
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"has files that are not part of a dataset \(manifest.json\)"
    ):
        verb.run(settings, overwrite=True)
    assert (tmp_path / "out" / "manifest.json").read_text() == "{}"


def test_the_records_of_a_group_stay_in_one_split_by_default() -> None:
    rows = {"layout": "groups", "group_by": "qid", "shared": ["query"], "fields": {"query": 8}}
    settings = build_settings({**SOURCE, "rows": rows, "split": {"heldout_fraction": 0.2}})
    assert (settings.split.group_by, settings.split.heldout_fraction) == ("qid", 0.2)
    with pytest.raises(SettingsError, match=r'one split; set split\.group_by = "qid"'):
        build_settings({**SOURCE, "rows": rows, "split": {"group_by": "user"}})
