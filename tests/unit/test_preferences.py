"""Rows of preferences: the formats of records, their tokens and marks, and unusable records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge import config
from regauge.commands import prepare as verb
from regauge.data.conversations import ConversationError
from regauge.data.dataset import REJECTED, Dataset
from regauge.data.layouts.preferences import parse_preference
from regauge.data.tokenizer import LoadedTokenizer
from regauge.system.errors import SettingsError
from unit.preparing import build_tables

USER = {"role": "user", "content": "Weather?"}
GOOD = {"role": "assistant", "content": "Sunny."}
BAD = {"role": "assistant", "content": "No idea."}
ROWS: dict[str, Any] = {"layout": "preferences", "length": 128, "chat_template": "alpaca"}


def parse(**record: Any) -> list[Any]:
    return [(c.messages, c.num_prompt_messages) for c in parse_preference(record)]


EXPECTED = [([USER, GOOD], 1), ([USER, BAD], 1)]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Weather?", "chosen": "Sunny.", "rejected": "No idea."},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Weather?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "Sunny.", "rejected": "No idea."},
        {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": " ", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Weather? ", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "prompt": json.dumps([USER]),
            "chosen": json.dumps([GOOD]),
            "rejected": json.dumps([BAD]),
        },
    ],
)
def test_every_format_gives_the_same_conversations(record: dict[str, Any]) -> None:
    assert parse(**record) == EXPECTED


def test_only_messages_after_the_prompt_are_answers() -> None:
    history = [USER, BAD, {"role": "user", "content": "Again?"}]
    record: dict[str, Any] = {"chosen": [*history, GOOD], "rejected": [*history, BAD]}
    chosen, rejected = parse_preference({**record, "tools": [{"name": "weather"}]})
    for conversation in (chosen, rejected):
        answers = [number for number in range(4) if conversation.is_answer(number)]
        assert answers == [3]
        assert conversation.variables == {"tools": [{"name": "weather"}]}


def test_a_text_in_brackets_is_no_list_of_messages() -> None:
    ((messages, _), _) = parse(prompt="[1, 2]", chosen='["a"]', rejected="[")
    assert [message["content"] for message in messages] == ["[1, 2]", '["a"]']


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, "'prompt' is missing"),
        ({"prompt": "p", "rejected": "b"}, "'chosen' is missing"),
        ({"prompt": "p", "chosen": "a", "rejected": " "}, "'rejected' is missing"),
        ({"prompt": "p", "chosen": 3, "rejected": "b"}, "'chosen' is neither a text nor"),
        ({"prompt": ["p"], "chosen": "a", "rejected": "b"}, "'prompt' is neither a text nor"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD]}, "share no message"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "'rejected' has no answer after"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "'chosen' has no answer after"),
        (
            {"prompt": "Time?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "'prompt' is not in the messages",
        ),
        (
            {"prompt": [BAD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "'prompt' is not in the messages",
        ),
        (
            {"prompt": "p", "chosen": [{**GOOD, "role": "bird"}], "rejected": "b"},
            "share no message",
        ),
    ],
)
def test_an_unusable_record_has_its_cause(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversationError, match=reason):
        parse(**record)


def prepare(folder: Path, records: list[dict[str, Any]], **rows: Any) -> Dataset:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tables = build_tables(folder, rows={**ROWS, **rows}, split={"heldout_fraction": 0.1})
    verb.run(config.build(verb.PrepareSettings, tables))
    return Dataset(folder / "out")


def write_records(count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(count)
    words = [" ".join(f"w{n}" for n in draw.integers(0, 500, 6)) for _ in range(3 * count)]
    fields = ("prompt", "chosen", "rejected")
    return [dict(zip(fields, words[i : i + 3], strict=True)) for i in range(0, 3 * count, 3)]


def test_rows_have_the_tokens_of_the_template_and_marks_of_the_answers(tmp_path: Path) -> None:
    records = write_records(40)
    data = prepare(tmp_path, records)
    tokenizer = LoadedTokenizer(data.folder / "tokenizer")
    kinds = {name: column.kind for name, column in data.manifest.columns.items()}
    assert kinds == {
        "chosen": "tokens",
        "rejected": "tokens",
        "chosen_mask": "loss_mask",
        "rejected_mask": "loss_mask",
    }
    expected = {
        f"### Instruction:\n{r['prompt']}\n\n### Response:\n{r[name]}": r[name]
        for r in records
        for name in ("chosen", "rejected")
    }
    assert len(data.rows("train")) + len(data.rows("heldout")) == len(records)
    for row in data.rows("train").take(range(len(data.rows("train")))):
        for name in ("chosen", "rejected"):
            text = tokenizer.decode(row[name].tolist()).strip()
            assert tokenizer.decode(row[name][row[f"{name}_mask"] > 0].tolist()) == expected[text]
            assert row[f"{name}_mask"][-1] == 1, "the token that ends the answer is trained"
    lengths = data.manifest.columns["chosen"].lengths["train"]
    assert sum(lengths) == len(data.rows("train"))


def test_unusable_records_are_written_and_counted(tmp_path: Path) -> None:
    equal = {"prompt": "p", "chosen": "the same", "rejected": "the same"}
    text = "long words " * 100
    cut = {"prompt": "p", "chosen": f"{text} one", "rejected": f"{text} two"}
    lost = {"prompt": text, "chosen": "one", "rejected": "two"}
    missing = {"prompt": "p", "chosen": "one"}
    data = prepare(tmp_path, [*write_records(20), equal, cut, lost, missing])
    assert data.manifest.skipped == {
        "'chosen' equals 'rejected'": 1,
        "'chosen' equals 'rejected' within 128 tokens": 1,
        "no answer within 128 tokens": 1,
        "no answer": 1,
    }
    assert len((data.folder / REJECTED).read_text().splitlines()) == 4


def test_long_answers_are_truncated_or_rejected(tmp_path: Path) -> None:
    long = {"prompt": "p", "chosen": "word " * 400, "rejected": "two"}
    data = prepare(tmp_path, [*write_records(20), long])
    assert data.manifest.truncated == {"chosen": 1}
    (tmp_path / "other").mkdir()
    data = prepare(tmp_path / "other", [*write_records(20), long], too_long="reject")
    assert data.manifest.skipped == {"longer than 128 tokens": 1}


@pytest.mark.parametrize(
    ("rows", "record", "message"),
    [
        (
            {},
            {"prompt": "p", "choosen": "a", "rejected": "b"},
            "no field 'chosen' with a value; did you mean",
        ),
        ({"chat_template": None}, write_records(1)[0], "has no chat template"),
        ({"too_long": "split"}, write_records(1)[0], "conversations cannot be split"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, rows: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        prepare(tmp_path, [record], **rows)
