"""Random records and settings: a result with every record counted, or an error with its remedy."""

from __future__ import annotations

import csv
import io
import itertools
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import regauge
from regauge.commands import prepare
from regauge.commands.train import TrainSettings
from regauge.config import Settings, merge
from regauge.system.errors import RegaugeError
from unit.preparing import build_settings, prepare_dataset, write_corpus


def choose_counts(quick: int, full: int) -> list[Any]:
    """Return the numbers of examples: half a minute of both tests, and ten minutes."""
    return [pytest.param(quick, id="quick"), pytest.param(full, id="full", marks=pytest.mark.full)]


PIECES = [
    "word",
    "Zoë",
    "e\u0301",
    "日本語",
    '"',
    "'",
    ",",
    "\t",
    "\n",
    "\r\n",
    "\\",
    " ",
    "\ufeff",
]
PIECES += ["\x00", "\u2028", "\u200b", "\u202e", "🙂", "\ud800", "</s>", "[MASK]", "{{", "%", "NaN"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.booleans()
SCALARS = st.none() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2)
)
LABELS = st.sampled_from(["yes", "no", " yes", "YES"])
ORDINARY = st.fixed_dictionaries({"text": st.just("some words to read"), "label": LABELS})
ODD = st.fixed_dictionaries({}, optional={"text": VALUES | TEXTS, "label": VALUES, "more": VALUES})
RECORDS = st.tuples(st.lists(ORDINARY, max_size=6), st.lists(ODD, max_size=6)).map(
    lambda parts: [*parts[0], *parts[1]]
)
ROWS: list[dict[str, Any]] = [
    {"layout": "packed", "text": "text", "length": 8},
    {"layout": "fields", "fields": {"text": 8}, "labels": {"label": []}},
    {"layout": "fields", "fields": {"text": 8}, "floats": ["label"]},
    {"layout": "fields", "fields": {"text": 8}, "integers": ["label"]},
    {"layout": "fields", "fields": {"text": 8}, "categories": ["label"]},
    {"layout": "fields", "fields": {"text": 8, "label": 8}},
    {"layout": "groups", "group_by": "label", "fields": {"text": 8, "more": 8}, "shared": ["more"]},
    {"layout": "tagged", "fields": {"text": 8}, "labels": {"label": []}},
    {"layout": "chat", "length": 8, "chat_template": "chatml"},
    {"layout": "preferences", "length": 8, "chat_template": "chatml"},
]


def write_jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_csv(records: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, ["text", "label", "more"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue().encode(errors="surrogatepass")


def write_tsv(records: list[dict[str, Any]]) -> bytes:
    return write_csv(records, delimiter="\t")


def write_unquoted(records: list[dict[str, Any]]) -> bytes:
    """Return lines as a careless program writes them: without quotation marks around texts."""
    lines = [f"{record.get('text')},{record.get('label')}" for record in records]
    return "\n".join(["text,label", *lines]).encode(errors="surrogatepass")


def write_parquet(records: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    texts = [{name: repr(value) for name, value in record.items()} for record in records]
    schema = pa.schema([(name, pa.string()) for name in ("text", "label", "more")])
    pq.write_table(pa.Table.from_pylist(texts, schema), stream)
    return stream.getvalue()


def write_text(records: list[dict[str, Any]]) -> bytes:
    return "\n".join(str(record.get("text")) for record in records).encode(errors="surrogatepass")


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "tsv": write_tsv,
    "txt": write_text,
    "parquet": write_parquet,
    "unquoted.csv": write_unquoted,
}
KINDS = {"jsonl": "jsonl", "csv": "csv", "tsv": "csv", "txt": "text", "parquet": "parquet"}
DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: content,
    lambda content: b"\xef\xbb\xbf" + content,
    lambda content: content.replace(b"\n", b"\r\n"),
    lambda content: content[:-3],
    lambda content: content + b'{"text": "cut',
    lambda content: content + b"\xff\xfe\x00\n",
    lambda content: content.replace(b"word", b"\xe9t\xe9"),
    lambda content: content.decode(errors="replace").encode("utf-16"),
]


def check_message(error: RegaugeError) -> None:
    assert error.problem
    assert error.remedy
    assert str(error).isprintable()


@pytest.mark.parametrize("examples", choose_counts(250, 6000))
def test_each_record_is_prepared_or_counted(tmp_path: Path, examples: int) -> None:
    numbers = itertools.count()
    prepared = []

    @settings(
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(
        records=RECORDS,
        suffix=st.sampled_from(sorted(WRITERS)),
        damage=st.sampled_from(DAMAGES),
        rows=st.sampled_from(ROWS),
        share=st.sampled_from([0.0, 0.3]),
    )
    def check(
        records: list[dict[str, Any]],
        suffix: str,
        damage: Callable[[bytes], bytes],
        rows: dict[str, Any],
        share: float,
    ) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        path = folder / f"records.{suffix}"
        path.write_bytes(damage(WRITERS[suffix](records)))
        source = {"kind": KINDS[suffix.rpartition(".")[2]], "files": [str(path)]}
        try:
            result = prepare.run(
                build_settings(
                    folder,
                    source=source,
                    rows=rows,
                    split={"heldout_fraction": share},
                )
            )
        except RegaugeError as error:
            check_message(error)
            return
        json.dumps(result, allow_nan=False)
        prepared.append(result)
        if suffix == "jsonl" and damage is DAMAGES[0] and rows["layout"] == "fields":
            counts = result["train_rows"], result["heldout_rows"], *result["skipped"].values()
            assert sum(counts) == len(records)

    check()
    assert prepared


def list_keys(table: type[Settings], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted keys of a table and its tables, each with the words that it accepts."""
    for name, field in table.model_fields.items():
        parts = [field.annotation, *typing.get_args(field.annotation)]
        tables = [part for part in parts if isinstance(part, type) and issubclass(part, Settings)]
        words = [word for part in parts for word in typing.get_args(part) if isinstance(word, str)]
        yield prefix + name, words
        for inner in tables:
            yield from list_keys(inner, f"{prefix}{name}.")


NUMBER_VALUES = [0, 1, 2, 3, -1, 10**6, 2**31, 2**63, 10**30, 0.0, 0.5, -0.5, 1e-300, 1e300]
NUMBER_VALUES += [float("nan"), float("inf")]
TEXT_VALUES = ["", "a", "auto", "none", "\u00e9\n", "../x", "\x00", "-1", "1e3", "x" * 5000]
NESTED_VALUES: list[Any] = [None, True, False, [], ["a"], [0.1, 0.2], [[]], {}, {"a": 1}, {"": {}}]
RUN: dict[str, Any] = {
    "task": {"kind": "mlm"},
    "batch": {"rows": 4},
    "stop": {"steps": 3},
    "model": {
        "architecture": "bert",
        "config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "max_position_embeddings": 64,
        },
    },
    "optimizer": {"learning_rate": 1e-3},
    "execution": {"compile": "off"},
}


@pytest.mark.parametrize("examples", choose_counts(50, 1500))
def test_each_setting_is_used_or_refused(tmp_path: Path, examples: int) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 40)
    prepare_dataset(tmp_path, "data")
    folders = {
        "data": {"path": str(tmp_path / "data")},
        "output": {"folder": str(tmp_path / "out")},
    }
    base = merge(RUN, folders)
    accepted = []

    @settings(
        max_examples=examples, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(key=st.sampled_from(sorted(list_keys(TrainSettings))), data=st.data())
    def check(key: tuple[str, list[str]], data: st.DataObject) -> None:
        name, words = key
        chosen = data.draw(st.sampled_from([*words, *NUMBER_VALUES, *TEXT_VALUES, *NESTED_VALUES]))
        for part in reversed(name.split(".")):
            chosen = {part: chosen}
        try:
            plan = regauge.train(merge(base, chosen), dry_run=True)
        except RegaugeError as error:
            check_message(error)
            return
        json.dumps(plan.document, allow_nan=False)
        accepted.append(plan)

    check()
    assert accepted
    assert not (tmp_path / "out").exists()
