"""Recipes: fields that are chosen from a data file, and run files that other verbs read."""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge import commands, config
from regauge.cli import main
from regauge.commands._recipes import field_choice
from regauge.commands._recipes.data_file import MAX_RECORDS, find_delimiter, read_data_file
from regauge.commands._recipes.settings import (
    BUILDERS,
    DESCRIPTIONS,
    EXAMPLES,
    JOBS,
    MAX_LINE,
    format_tables,
    write_recipe,
)
from regauge.data.dataset import read_manifest
from regauge.system import choices
from regauge.system.errors import DataError, SettingsError
from regauge.training.settings import TrainSettings

MAX_LINES = 25


def write_jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


KEYS = st.text(min_size=1, max_size=8)
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4))
def test_tables_are_read_as_they_were_formatted(tables: dict[str, Any]) -> None:
    assert tomllib.loads("\n".join(format_tables(tables))) == tables


def test_every_recipe_has_a_description_and_an_example() -> None:
    assert BUILDERS.keys() == DESCRIPTIONS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"increment"}))
def test_a_recipe_without_data_names_its_file_and_fields(name: str) -> None:
    text = write_recipe(name, "job.toml", None, None)
    _, file, record = EXAMPLES[name]
    assert f"# Its data is {file}, with the fields: {', '.join(record)}." in text
    assert tomllib.loads(text)["source"]["files"] == [file]
    assert len(text.splitlines()) <= MAX_LINES
    assert "#   regauge train job.toml\n#   regauge " in text


def test_a_model_replaces_the_architecture_and_the_trained_tokenizer() -> None:
    tables = tomllib.loads(write_recipe("classify", "job.toml", None, "org/model"))
    assert tables["model"] == {"path": "org/model"}
    assert "tokenizer" not in tables


def test_fine_tuning_a_causal_model_uses_lora_and_its_chat_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tables = tomllib.loads(write_recipe("sft", "job.toml", None, str(tmp_path)))
    assert tables["model"]["lora"] == {"rank": 16}
    assert "chat_template" not in tables["rows"]


def test_an_increment_needs_a_run(tmp_path: Path) -> None:
    for model in (None, str(tmp_path)):
        with pytest.raises(
            SettingsError, match="continues a run; name its output folder with --mo"
        ):
            write_recipe("increment", "job.toml", None, model)


def test_an_increment_is_short_and_has_the_dataset_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset of the run is relative to the folder in which it was trained."""
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path)
    records = ({"text": f"words {i} and more", "label": "ab"[i % 2]} for i in range(40))
    data = write_jsonl(tmp_path / "a.jsonl", *records)
    (tmp_path / "first.toml").write_text(write_recipe("classify", "first.toml", data, None))
    assert main(["prepare", "first.toml", "split.similarity=1.0"]) == 0
    tables = config.read("first.toml")
    settings = config.build(TrainSettings, tables, commands.table_names())
    identity = {"format": config.FORMAT, "run_id": "r", "data_fingerprint": "f"}
    run = tmp_path / "out/first/run.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({**config.dump(settings), "run": identity}))
    for folder in (tmp_path, tmp_path / "new"):
        monkeypatch.chdir(folder)
        name = os.path.relpath(run.parent)
        text = write_recipe("increment", "second.toml", data, name)
        assert len(text.splitlines()) <= MAX_LINES
        mix = tomllib.loads(text)["data"]["mix"]
        assert Path(mix[0]["path"]).resolve() == tmp_path / "out/first-data"
        increment = config.build(TrainSettings, tomllib.loads(text), commands.table_names())
        task = increment.task_configs[0].task
        manifest = read_manifest(Path(mix[0]["path"]))
        assert task.resolve_defaults(manifest) == settings.task_configs[0].task.resolve_defaults(
            manifest
        )


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_the_delimiter_of_a_table_is_recognized(
    tmp_path: Path, delimiter: str, suffix: str
) -> None:
    path = tmp_path / f"data{suffix}"
    rows = [("text", "label"), *((f"Some words {i}, and more", f"class {i % 3}") for i in range(9))]
    path.write_text("".join(f'"{text}"{delimiter}"{label}"\n' for text, label in rows))
    default = {".csv": ",", ".tsv": "\t"}[suffix]
    assert find_delimiter(path) == (None if delimiter == default else delimiter)
    assert list(read_data_file(path).fields) == ["text", "label"]


def test_long_texts_raise_the_limit_and_the_positions(tmp_path: Path) -> None:
    records = ({"body": "word " * 150, "kind": "ab"[i % 2]} for i in range(40))
    data = write_jsonl(tmp_path / "data.jsonl", *records)
    tables = tomllib.loads(write_recipe("classify", "job.toml", data, None))
    limit = tables["rows"]["fields"]["body"]
    assert 150 < limit <= 256
    assert tables["model"]["config"]["max_position_embeddings"] == limit
    assert tables["rows"]["labels"] == ["kind"]
    assert tables["task"] == {"kind": "classify", "text_fields": ["body"], "label": "kind"}


def test_a_label_without_a_known_name_is_the_field_with_the_fewest_values(tmp_path: Path) -> None:
    records = [{"id": i, "says": f"text {i}", "mood": i % 3, "constant": 1} for i in range(30)]
    data = read_data_file(write_jsonl(tmp_path / "data.jsonl", *records))
    assert field_choice.find_label(data) == "mood"
    assert field_choice.find_text(data, {"mood"}) == "says"


def test_pairs_are_found_by_name_else_in_order(tmp_path: Path) -> None:
    record = {"Answer": "a", "note": "n", "negative": "x", "Question": "q"}
    data = read_data_file(write_jsonl(tmp_path / "named.jsonl", record))
    assert field_choice.find_pair(data) == ("Question", "Answer")
    assert field_choice.find_negatives(data) == ["negative"]
    data = read_data_file(write_jsonl(tmp_path / "unnamed.jsonl", {"left": "a", "right": "b"}))
    assert field_choice.find_pair(data) == ("left", "right")


@pytest.mark.parametrize(
    ("name", "record", "content"),
    [
        ("classify", {"text": "a"}, "a label"),
        ("lm", {"number": 1}, "a text"),
        ("embed", {"text": "a"}, "a query and a document"),
        ("embed", {"label": "sport", "text": "a"}, "a query and a document"),
        ("sft", {"prompt": "a"}, "conversations"),
    ],
)
def test_a_file_without_the_fields_of_a_job_is_refused(
    tmp_path: Path, name: str, record: dict[str, Any], content: str
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", record)
    with pytest.raises(DataError, match=rf"has no field with {content}; its fields are: "):
        write_recipe(name, "job.toml", data, None)


def test_every_task_has_a_recipe() -> None:
    kinds = {
        tomllib.loads(write_recipe(name, "job.toml", None, None))["task"]["kind"]
        for name in set(BUILDERS) - {"increment"}
    }
    assert kinds == set(choices.names("tasks"))
    assert {name for names in JOBS.values() for name in names} == set(BUILDERS)


RECORDS: dict[str, dict[str, Any]] = {
    "tokens": {"words": ["Ada", "works"], "ner": ["B-PER", "O"], "id": 1},
    "triplet": {"question": "a b", "answer": "c d", "negative": "e f"},
    "similarity": {"left": "a b", "right": "c d", "grade": 0.5},
    "distill": {"body": "a b", "teacher": [0.6, 0.8, 0.0, 0.0]},
    "dpo": {"prompt": "a b", "chosen": "c d", "rejected": "e f"},
    "mlm": {"body": "a b c"},
    "classify": {"body": "a b c", "label": "x"},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name != "classify"))
        for name in sorted(RECORDS)
    ],
)
def test_a_recipe_is_prepared_with_its_validation_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, count in (("train.jsonl", 40), ("dev.jsonl", 9)):
        write_jsonl(tmp_path / file, *[RECORDS[name]] * count)
    train, dev = Path("train.jsonl"), Path("dev.jsonl")
    text = write_recipe(name, "job.toml", train, None, dev)
    Path("job.toml").write_text(text)
    tables = tomllib.loads(text)
    assert tables["validation"] == {"source": {"files": ["dev.jsonl"]}}
    assert "split" not in tables
    config.build(TrainSettings, config.read("job.toml"), commands.table_names())
    keep = 'validation.near_duplicates="keep"'
    assert main(["prepare", "job.toml", keep, "tokenizer.vocab_size=300"]) == 0
    manifest = read_manifest(Path("out/job-data"))
    assert manifest.splits["heldout"].rows > 0
    with pytest.raises(SettingsError, match="is not a file; correct --validation"):
        write_recipe(name, "job.toml", train, None, tmp_path / "missing.jsonl")


def test_only_the_first_records_are_read(tmp_path: Path) -> None:
    records = ({"text": f"text {i}", "label": i % 2} for i in range(MAX_RECORDS + 5))
    data = read_data_file(write_jsonl(tmp_path / "data.jsonl", *records))
    assert (data.num_records, data.is_complete) == (MAX_RECORDS, False)
    assert len(data.fields["text"].values) == MAX_RECORDS


def test_a_damaged_file_and_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("no json\n")
    with pytest.raises(DataError, match="line 1: "):
        read_data_file(path)
    path.write_text("")
    with pytest.raises(DataError, match="does not contain records; name a file with records"):
        read_data_file(path)
    with pytest.raises(SettingsError, match="is not a file; correct --data"):
        read_data_file(tmp_path / "missing.jsonl")
    path = tmp_path / "data.xml"
    path.write_text("<a/>")
    with pytest.raises(SettingsError, match=r"has no known suffix; use one of \.jsonl"):
        read_data_file(path)


def test_the_candidates_of_a_query_are_grouped_by_its_id(tmp_path: Path) -> None:
    record = {"query": "words", "document": "A text.", "label": 1}
    for name, expected in (("qid", "qid"), ("year", "query")):
        data = write_jsonl(tmp_path / f"{name}.jsonl", *({**record, name: i} for i in range(9)))
        tables = tomllib.loads(write_recipe("rank", "job.toml", data, None))
        assert tables.get("rows", {}).get("group_by", "query") == expected


def test_the_last_command_of_pairs_embeds_the_documents(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", {"title": "a", "some text": "b"})
    text = write_recipe("embed", "job.toml", data, None)
    *_, command = (line for line in text.splitlines() if line.startswith("#   "))
    assert shlex.split(command)[-1] == 'predict.text_fields=["some text"]'


def test_the_output_folders_have_the_name_of_the_run_file(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "my data.jsonl", {"text": "a", "label": 0})
    text = write_recipe("classify", f"{tmp_path}/my job.toml", data, None)
    tables = tomllib.loads(text)
    assert tables["output"]["folder"] == "out/my job"
    assert tables["data"]["path"] == "out/my job-data"
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("#   ")]
    assert [words[2:] for words in commands] == [
        ["prepare", f"{tmp_path}/my job.toml"],
        ["train", f"{tmp_path}/my job.toml"],
        [
            *("predict", "out/my job", "--source", str(data)),
            *("--to", "out/my job-output", "output.format=csv"),
        ],
    ]


def test_lines_are_short_if_they_can_be() -> None:
    text = write_recipe("rank", "job.toml", None, None)
    long_lines = [line for line in text.splitlines() if len(line) > MAX_LINE]
    assert all(line.startswith("model.config = ") for line in long_lines)
