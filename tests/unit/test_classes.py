"""Labels: class names that are found or declared, their numbers in rows, and refused labels."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distributed.runs import BERT, settings
from regauge import config
from regauge.commands import prepare as verb
from regauge.config import build
from regauge.data.classes import NO_CLASS, LabelCounts, find_classes, list_class_texts
from regauge.data.dataset import Dataset
from regauge.data.prepare.evaluation_data import prepare_like
from regauge.data.settings import RowLayout
from regauge.data.sources.huggingface import _read_class_names
from regauge.system import processes
from regauge.system.errors import DataError, RegaugeError, SettingsError
from regauge.tasks.classify import Classify
from regauge.training import dry_run
from regauge.training.run import attempt
from unit.preparing import WORDS, prepare_dataset, read_contents

NAMES = ("cooking", "finance", "sport")
NAMED = {"0": "sport", "1": "finance", "2": "cooking"}
"""Class names by number, as `datasets` writes them to a README."""
ALL_TRAIN: dict[str, Any] = {"split": {"heldout_fraction": 0.0}}


def build_rows(labels: Any) -> dict[str, Any]:
    return {"layout": "fields", "fields": {"text": 16}, "labels": labels}


def write_labels(folder: Path, values: Iterable[Any], name: str = "a.jsonl") -> list[Any]:
    """Write records with different texts and the given labels; None leaves the label out."""
    labels = list(values)
    lines = []
    for index, label in enumerate(labels):
        words = np.random.default_rng([index, len(name)]).choice(WORDS, 12)
        record = {"text": " ".join(words)} | ({} if label is None else {"label": label})
        lines.append(json.dumps(record) + "\n")
    (folder / name).write_text("".join(lines))
    return labels


def prepare_labels(
    folder: Path, values: Iterable[Any], labels: Any = ("label",), **changes: Any
) -> tuple[Dataset, list[Any]]:
    """Prepare records without a held-out split; return the dataset and the labels of its rows."""
    write_labels(folder, values)
    data = prepare_dataset(folder, rows=build_rows(labels), **{**ALL_TRAIN, **changes})
    return data, read_labels(data)


def read_labels(data: Dataset, split: str = "train") -> list[Any]:
    rows = data.rows(split)
    values = (row["label"] for row in rows.take(range(len(rows))))
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def test_names_are_sorted_and_come_back_from_the_manifest(tmp_path: Path) -> None:
    values = [NAMES[index % 3] for index in (2, 0, 1, 1, 2, 2)]
    data, numbers = prepare_labels(tmp_path, values)
    column = data.manifest.columns["label"]
    assert (column.kind, column.class_names, column.num_classes) == ("integer", NAMES, 3)
    assert [NAMES[number] for number in numbers] == values
    assert column.class_counts == {"train": (1, 2, 3), "heldout": (0, 0, 0)}


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([0, 2, 1], [0, 2, 1]),
        ([1.0, 0.0, 1.0], [1, 0, 1]),
        ([True, False], [1, 0]),
        (["1", "0", "2.0"], [1, 0, 2]),
        (["1", 1, True, 1.0, 0], [1, 1, 1, 1, 0]),
    ],
)
def test_whole_numbers_are_classes_without_names(
    tmp_path: Path, values: list[Any], numbers: list[int]
) -> None:
    data, labels = prepare_labels(tmp_path, values)
    assert labels == numbers
    column = data.manifest.columns["label"]
    assert (column.class_names, column.num_classes) == (None, max(numbers) + 1)


def test_numbers_with_leading_zeros_are_names(tmp_path: Path) -> None:
    data, labels = prepare_labels(tmp_path, ["007", "7", "007"])
    assert data.manifest.columns["label"].class_names == ("007", "7")
    assert labels == [0, 1, 0]


@pytest.mark.parametrize("values", [["sport", "cooking", "sport"], [0, 2, 0], ["0", "2", 0]])
def test_declared_names_fix_the_order(tmp_path: Path, values: list[Any]) -> None:
    declared = {"label": ["sport", "finance", "cooking"]}
    data, labels = prepare_labels(tmp_path, values, declared)
    assert data.manifest.columns["label"].class_names == ("sport", "finance", "cooking")
    assert labels == [0, 2, 0]


def test_declared_numbers_are_names_not_indices(tmp_path: Path) -> None:
    data, labels = prepare_labels(tmp_path, [1, -1, 1], {"label": ["-1", "1"]})
    assert labels == [1, 0, 1]
    with pytest.raises(DataError, match="2 training records have the class '0' in 'label'"):
        prepare_labels(tmp_path, [0, 0, 1], {"label": ["1", "0.5"]}, data={"path": f"{tmp_path}/b"})
    assert data.manifest.columns["label"].class_names == ("-1", "1")


def test_lists_of_classes_become_lists_of_numbers(tmp_path: Path) -> None:
    values: list[Any] = [["b", "a"], [], ["c", "c"], "a"]
    data, labels = prepare_labels(tmp_path, values)
    column = data.manifest.columns["label"]
    assert (column.kind, column.class_names) == ("integers", ("a", "b", "c"))
    assert labels == [[1, 0], [], [2], [0]]
    assert column.class_counts["train"] == (2, 1, 1)


@pytest.mark.full
def test_the_bytes_do_not_depend_on_the_processes(tmp_path: Path) -> None:
    values = [NAMES[index % 3] for index in range(300)]
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_labels(tmp_path, values, name)
        with (tmp_path / name).open("a") as file:  # pieces of more than one MiB
            file.write("".join(json.dumps({"text": WORDS[1] * 9000}) + "\n" for _ in range(20)))
    contents = [
        read_contents(
            prepare_dataset(
                tmp_path, name, rows=build_rows(["label"]), prepare={"processes": count}
            ).folder
        )
        for name, count in (("one", 1), ("two", 2))
    ]
    assert contents[0] == contents[1]
    assert len(json.loads(contents[0]["inputs.json"])["pieces"]) == 3


def test_a_record_without_a_class_is_rejected(tmp_path: Path) -> None:
    values = ["a", None, "b", "", {"a": 1}, [None], "a", "b", "a", "b"]
    data, labels = prepare_labels(tmp_path, values)
    assert data.manifest.skipped == {"no class in 'label'": 4}
    assert labels == [0, 1, 0, 1, 0, 1]
    lines = map(json.loads, (data.folder / "rejected.jsonl").read_text().splitlines())
    assert [(line["location"], line["detail"]) for line in lines] == [
        ("line 2", "no value"),
        ("line 4", "no value"),
        ("line 5", "dict {'a': 1}"),
        ("line 6", "no value"),
    ]


@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        ([0.5, 1.0, 0.0], ["label"], 'rows.floats, and set task.problem_type = "regression"'),
        (["0.5", "1.0"], ["label"], "numbers that are not classes, such as 0.5; move"),
        ([-1, 1], ["label"], 'the class -1; .* rows.labels.label = \\["-1", "1"\\]'),
        (
            ["spam", "ham", "spam"],
            {"label": ["ham", "eggs"]},
            "2 training records have the class 'spam' in 'label', .*; add it to rows.labels",
        ),
        ([0, 3], {"label": ["a", "b"]}, "1 training record has the class '3' in 'label'"),
        ([1, 70000], ["label"], "the class 70000; the maximum is 65535; number the classes from 0"),
    ],
)
def test_labels_that_are_no_classes_are_refused(
    tmp_path: Path, values: list[Any], labels: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare_labels(tmp_path, values, labels)


@pytest.mark.parametrize("rare", ["rugby", 7])
def test_a_class_that_only_held_out_rows_have_is_refused(rare: str | int) -> None:
    text = str(rare)
    common = Counter({"0": 5, "1": 5} if text == "7" else {"a": 5, "b": 5})
    counts = LabelCounts(common, Counter({text: 2}))
    problem = f"2 held-out records have the class '{rare}' in 'label', .*; set rows.labels.label"
    with pytest.raises(DataError, match=problem):
        find_classes("label", counts)
    declared = (*common, text) if text != "7" else tuple("abcdefgh")
    assert find_classes("label", counts, declared).names == declared


def test_gaps_and_twins_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare_labels(tmp_path, [1, 2, 4])
    assert "no training record has the class 0, 3 of 'label'" in caplog.text
    prepare_labels(tmp_path, ["Sport", "sport ", "other"], data={"path": str(tmp_path / "twins")})
    assert "classes of 'label' differ in white space or case only: 'Sport' and 's" in caplog.text
    assert 'set rows.label_spelling = "fold"' in caplog.text


@pytest.mark.parametrize(
    ("spelling", "names"),
    [
        ("strip", ("GAMES", "Games", "New York", "games")),
        ("fold", ("Games", "New York")),
    ],
)
def test_spellings_of_a_class_are_merged(
    tmp_path: Path, spelling: str, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    values = ["Games", "games ", "Games", "GAMES", " Games", "New  York", "New York "]
    rows = {**build_rows(["label"]), "label_spelling": spelling}
    write_labels(tmp_path, values)
    data = prepare_dataset(tmp_path, rows=rows, **ALL_TRAIN)
    assert data.manifest.columns["label"].class_names == names
    keys = [" ".join(value.split()) for value in values]
    if spelling == "fold":
        keys = [{"games": "Games", "new york": "New York"}[key.lower()] for key in keys]
        assert "differ in white space or case" not in caplog.text
    assert [names[number] for number in read_labels(data)] == keys
    (tmp_path / "other").mkdir()
    write_labels(tmp_path / "other", ["NEW york" if spelling == "fold" else " New York", "Games"])
    files = {"kind": "jsonl", "files": (str(tmp_path / "other" / "a.jsonl"),)}
    source = config.parse_choice("data/sources", files)
    evaluated = Dataset(prepare_like(data.folder, source, tmp_path / "like"))
    assert evaluated.manifest.columns["label"].class_names == names
    assert [names[number] for number in read_labels(evaluated, "heldout")] == ["New York", "Games"]


def test_spellings_are_those_of_declared_names(tmp_path: Path) -> None:
    rows = {**build_rows({"label": ["Sport", "B-PER"]}), "label_spelling": "fold"}
    write_labels(tmp_path, [["sport", "SPORT "], ["b-per", "Sport"], "B-Per"])
    data = prepare_dataset(tmp_path, rows=rows, **ALL_TRAIN)
    assert data.manifest.columns["label"].class_names == ("Sport", "B-PER")
    assert read_labels(data) == [[0], [1, 0], [1]]
    rows["labels"] = {"label": ["Sport", "sport"]}
    with pytest.raises(DataError, match=r"two names of 'label' are one class by rows\.label_spell"):
        prepare_dataset(tmp_path, "two", rows=rows, **ALL_TRAIN)


def test_spellings_of_tags_are_merged(tmp_path: Path) -> None:
    tag_lists = (["O", "B-X", "b-x"], ["o"] * 3)
    records = [{"tokens": ["a", "b", "c"], "tags": tags} for tags in tag_lists]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = {"layout": "tagged", "label_spelling": "fold", "labels": {"tags": ["O", "B-X"]}}
    data = prepare_dataset(tmp_path, rows=rows, **ALL_TRAIN)
    tags = [row["tags"][row["tags"] >= 0].tolist() for row in data.rows("train").take([0, 1])]
    assert tags == [[0, 1, 1], [0, 0, 0]]


@given(
    st.lists(st.one_of(st.text(), st.integers(-3, 12), st.booleans(), st.floats(-2, 9)), min_size=1)
)
def test_each_class_has_one_number_and_each_number_one_class(values: list[Any]) -> None:
    texts = []
    for value in values:
        try:
            texts.append(list_class_texts(value))
        except TypeError:
            assert isinstance(value, str)
            assert not value.strip()
    counts = LabelCounts(Counter(text for (text,) in texts), Counter())
    try:
        classes = find_classes("label", counts)
    except DataError:
        assert any(float(text) < 0 or not float(text).is_integer() for (text,) in texts)
        return
    numbers = classes.number(pa.array(texts, pa.list_(pa.string()))).to_pylist()
    assert len(numbers) == len(texts)
    if classes.names is not None:
        assert [classes.names[number] for number in numbers] == [text for (text,) in texts]
        assert list(classes.names) == sorted(set(classes.names))
    else:
        assert numbers == [int(float(text)) for (text,) in texts]


def test_a_missing_text_in_a_list_has_the_number_of_no_class() -> None:
    classes = find_classes("tags", LabelCounts(Counter({"a": 1, "b": 1}), Counter(), 1))
    texts = pa.array([["b", None], [], ["a"]], pa.list_(pa.string()))
    assert classes.number(texts).to_pylist() == [[1, NO_CLASS], [], [0]]
    assert classes.number(texts.slice(1)).to_pylist() == [[], [0]]


def write_features(path: Path, labels: list[Any], feature: dict[str, Any]) -> None:
    """Write a Parquet file with the metadata that the library `datasets` writes."""
    texts = [
        " ".join(np.random.default_rng(index).choice(WORDS, 12)) for index in range(len(labels))
    ]
    table = pa.table({"text": texts, "label": labels})
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": feature}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)


CLASS_LABEL = {"names": ["sport", "finance", "cooking"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    ("labels", "feature", "numbers"),
    [
        ([0, 0, 1, -1, 0], CLASS_LABEL, [0, 0, 1, 0]),
        ([[0, 1], [], [1]], {"feature": CLASS_LABEL, "_type": "Sequence"}, [[0, 1], [], [1]]),
        ([[0, 1], [], [1]], {"feature": CLASS_LABEL, "_type": "List"}, [[0, 1], [], [1]]),
        ([[0, 1], [], [1]], [CLASS_LABEL], [[0, 1], [], [1]]),
    ],
)
def test_names_of_a_class_label_keep_their_order(
    tmp_path: Path, labels: list[Any], feature: Any, numbers: list[Any]
) -> None:
    write_features(tmp_path / "saved" / "train-00000-of-00001.parquet", labels, feature)
    data = prepare_source(tmp_path, {"kind": "huggingface", "name": str(tmp_path / "saved")})
    assert data.manifest.columns["label"].class_names == tuple(CLASS_LABEL["names"])
    assert read_labels(data) == numbers
    assert data.manifest.skipped == ({"no class in 'label'": 1} if -1 in labels else {})


def build_card(dtype: Any, **keys: Any) -> dict[str, Any]:
    """Return the table `dataset_info` of a dataset whose labels have a type."""
    return {"features": [{"name": "label", "dtype": dtype}], **keys}


CARDS: dict[str, Any] = {
    "a table": build_card({"class_label": {"names": NAMED}}),
    "a list of names": build_card({"class_label": {"names": [*NAMED.values()]}}),
    "one of several subsets": [
        build_card("int64", config_name="other"),
        build_card({"class_label": {"names": NAMED}}, config_name="default"),
    ],
}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("suffix", "labels"),
    [
        ("csv", [0, 0, 1, -1, 0]),
        ("csv", ["sport", "sport", "finance", "-1", "sport"]),
        ("jsonl", [0, 0, 1, -1, 0]),
        ("parquet", [0, 0, 1, -1, 0]),
    ],
)
def test_names_in_the_readme_of_a_dataset_keep_their_order(
    tmp_path: Path, card: str, suffix: str, labels: list[Any]
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    metadata = yaml.safe_dump({"dataset_info": CARDS[card]}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{metadata}---\n")
    texts = [" ".join(WORDS[5 * index : 5 * index + 5]) for index in range(len(labels))]
    table = pa.table({"text": texts, "label": labels})
    if suffix == "csv":
        pacsv.write_csv(table, folder / "train.csv")
    elif suffix == "parquet":
        pq.write_table(table, folder / "train.parquet")
    else:
        lines = (json.dumps(row) + "\n" for row in table.to_pylist())
        (folder / "train.jsonl").write_text("".join(lines))
    data = prepare_source(tmp_path, {"kind": "huggingface", "name": str(folder)})
    assert data.manifest.columns["label"].class_names == ("sport", "finance", "cooking")
    assert read_labels(data) == [0, 0, 1, 0]
    assert data.manifest.skipped == {"no class in 'label'": 1}


@pytest.mark.parametrize(
    ("info", "subset", "names"),
    [
        (None, "", {}),
        ("text", "", {}),
        ({"features": "text"}, "", {}),
        ({"features": [{"name": "label", "dtype": "int64"}, 3]}, "", {}),
        ({"features": [{"name": "a", "dtype": {"class_label": {"names": {"x": "b"}}}}]}, "", {}),
        (
            {
                "features": [
                    {"name": "tags", "sequence": {"class_label": {"names": {1: "B", 0: "A"}}}}
                ]
            },
            "",
            {"tags": ("A", "B")},
        ),
        (
            {"features": [{"name": "t", "list": {"dtype": {"class_label": {"names": ["A"]}}}}]},
            "",
            {"t": ("A",)},
        ),
        (CARDS["one of several subsets"], "other", {}),
        (CARDS["one of several subsets"], "none", {}),
        (
            [{**CARDS["a table"], "config_name": "en"}],
            "",
            {"label": ("sport", "finance", "cooking")},
        ),
        ([{**CARDS["a table"], "config_name": "en"}], "de", {}),
    ],
)
def test_class_names_of_a_card(info: Any, subset: str, names: dict[str, Any]) -> None:
    assert _read_class_names(info, subset) == names


def prepare_source(folder: Path, source: dict[str, Any]) -> Dataset:
    """Prepare the labels of a source without a held-out split."""
    tables = {
        "data": {"path": str(folder / "out")},
        "source": source,
        "tokenizer": {"vocab_size": 400},
        "rows": build_rows(["label"]),
        **ALL_TRAIN,
    }
    verb.run(build(verb.PrepareSettings, tables))
    return Dataset(folder / "out")


def test_names_of_several_sources_are_merged(tmp_path: Path) -> None:
    write_features(tmp_path / "a" / "a.parquet", [0, 2], CLASS_LABEL)
    other = {**CLASS_LABEL, "names": ["music", "sport"]}
    write_features(tmp_path / "b" / "b.parquet", [0, 1, 1], other)
    sources = [{"kind": "parquet", "files": [f"{tmp_path}/{name}/*.parquet"]} for name in "ab"]
    data = prepare_source(tmp_path, {"kind": "several", "sources": sources})
    assert data.manifest.columns["label"].class_names == ("cooking", "music", "sport")
    assert read_labels(data) == [2, 0, 1, 2, 2]


def test_groups_have_one_class_for_each_record(tmp_path: Path) -> None:
    records = [
        {"query": WORDS[index // 2], "text": WORDS[index], "label": ["yes", "no"][index % 2]}
        for index in range(8)
    ]
    rows = {
        "layout": "groups",
        "group_by": "query",
        "shared": ["query"],
        "fields": {"query": 8, "text": 8},
        "labels": ["label"],
    }
    split = {"group_by": "query", "heldout_fraction": 0.0}

    def prepare_records(out: str) -> Dataset:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return prepare_dataset(tmp_path, out, rows=rows, split=split)

    assert read_labels(prepare_records("out")) == [[1, 0]] * 4
    records[3]["label"] = ["yes", "no"]
    with pytest.raises(DataError, match="lists of classes in 'label'; use the layout 'fields'"):
        prepare_records("lists")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"labels": ["text"]}, "'text' is listed twice in rows; keep one kind"),
        ({"labels": ["label", "label"]}, "'label' is listed twice; remove one"),
        ({"labels": {"label": ["a", "a"]}}, "'label' has a class name twice; remove it"),
        ({"labels": {"label": ["a", ""]}}, "'label' has an empty class name; remove it"),
    ],
)
def test_invalid_tables_of_labels_are_refused(rows: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build(RowLayout, {"layout": "fields", "fields": {"text": 8}, **rows})


def test_a_list_of_labels_and_a_table_are_the_same_settings() -> None:
    listed, table = (build(RowLayout, build_rows(labels)) for labels in (["label"], {"label": []}))
    assert listed == table
    assert config.dump(listed)["labels"] == {"label": []}
    assert build(RowLayout, config.dump(listed)) == listed


@pytest.fixture(scope="module")
def names_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("named")
    write_labels(folder, [NAMES[index % 3] for index in range(60)])
    return prepare_dataset(folder, rows=build_rows(["label"]))


def test_a_task_takes_the_classes_of_the_dataset(names_data: Dataset, tmp_path: Path) -> None:
    task = Classify().resolve_defaults(names_data.manifest)
    assert (task.classes, task.class_names) == (3, NAMES)
    numbered, _ = prepare_labels(tmp_path, [0, 4, 1])
    task = Classify().resolve_defaults(numbered.manifest)
    assert (task.classes, task.class_names) == (5, ())
    task.check_dataset(numbered.manifest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 4}, "'label' has 3 classes, and task.classes = 4; remove task.classes"),
        (
            {"classes": 3, "class_names": ("sport", "finance", "cooking")},
            r'cooking, finance, sport, .* rows.labels.label = \["sport", "finance", "cooking"\]',
        ),
        ({"problem_type": "regression"}, "'label' has classes, .* in rows.floats"),
    ],
)
def test_a_task_with_other_classes_is_refused(
    names_data: Dataset, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegaugeError, match=message):
        Classify(**changes).check_dataset(names_data.manifest)


def test_a_run_has_the_names_in_its_records_and_its_model(
    names_data: Dataset, tmp_path: Path
) -> None:
    run = settings(
        tmp_path / "run",
        names_data.folder,
        "contrastive",
        task={"kind": "classify"},
        stop={"steps": 2},
    )
    attempt(run, processes.World())
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["task"]["class_names"] == list(NAMES)
    assert document["task"]["classes"] == len(NAMES)
    model = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert model["id2label"] == {str(index): name for index, name in enumerate(NAMES)}
    attempt(run, processes.World())  # resumes: the run file without classes is that of the run


def test_class_names_of_the_start_model_are_reported_if_the_dataset_has_none(
    names_data: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {**BERT["config"], "vocab_size": names_data.manifest.tokenizer.vocab_size}
    config = transformers.BertConfig(**sizes, id2label=dict(enumerate(NAMES)))
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "start")
    tokenizer = names_data.folder / "tokenizer"
    shutil.copytree(tokenizer, tmp_path / "start", dirs_exist_ok=True)
    numbered, _ = prepare_labels(tmp_path, [0, 1, 2, 1], tokenizer={"path": str(tokenizer)})
    changes = {"task": {"kind": "classify"}, "model": {"path": str(tmp_path / "start")}}
    for data in (names_data, numbered):
        run = settings(tmp_path / "run", data.folder, "contrastive", **changes, batch={"rows": 4})
        dry_run.check_run(run)
    warning = f"{tmp_path / 'start'}: its class names are not used: {', '.join(NAMES)};"
    remedy = f"name the classes with task.class_names = {json.dumps(NAMES)}"
    messages = [record.message for record in caplog.records if "class names" in record.message]
    assert messages == [f"{warning} {remedy}"]
