"""Wikipedia extracts: the same articles from both forms; what is cut off is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from regauge.data.sources import Rejected, _files
from regauge.data.sources.wikipedia import Wikipedia
from unit.preparing import corpus, prepared
from unit.reads import everything, fields, rejected

ARTICLES = [
    ("Anarchism", "Anarchism is a philosophy.\n\nIt has sections.\n\nHistory.\nLong ago &lt;1900."),
    ('"Heroes" (album)', "A record by\nDavid Bowie."),
    ("AT&amp;T", "A company &amp; more."),
    ("Redirect", ""),
]


def blocks(articles: list[tuple[str, str]] = ARTICLES) -> str:
    return "".join(
        f'<doc id="{number}" url="https://en.wikipedia.org/wiki?curid={number}" title="{title}">\n'
        f"{title}\n\n{text}\n\n</doc>\n"
        for number, (title, text) in enumerate(articles)
    )


def objects(articles: list[tuple[str, str]] = ARTICLES) -> str:
    return "".join(
        json.dumps({"id": "1", "revid": "2", "url": "u", "title": title, "text": text}) + "\n"
        for title, text in articles
    )


def source(folder: Path, text: str, name: str = "AA/wiki_00", **changes: str) -> Wikipedia:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Wikipedia(files=(f"{folder}/**/wiki_*",), **changes)


@pytest.mark.parametrize("form", [blocks, objects])
def test_both_forms_have_the_same_articles(tmp_path: Path, form: type) -> None:
    read = source(tmp_path, form())
    assert fields(read) == [{"title": title, "text": text} for title, text in ARTICLES]
    assert not rejected(read)
    decoded = fields(source(tmp_path, form(), entities="decode"))
    assert decoded[0]["text"] == ARTICLES[0][1].replace("&lt;", "<")
    assert decoded[2] == {"title": "AT&T", "text": "A company & more."}


def test_folders_of_both_forms_are_read_in_their_order(tmp_path: Path) -> None:
    source(tmp_path, blocks(ARTICLES[:2]), "AA/wiki_00")
    source(tmp_path, "", "AA/wiki_01")
    read = source(tmp_path, objects(ARTICLES[2:]), "AB/wiki_00")
    (tmp_path / "AB" / "wiki_01.gz").write_bytes(gzip.compress(blocks(ARTICLES[:1]).encode()))
    titles = [row["title"] for row in fields(read)]
    assert titles == [title for title, _ in (*ARTICLES, ARTICLES[0])]
    assert len(read.pieces()) == 1


def test_a_title_is_told_from_the_attributes_after_it(tmp_path: Path) -> None:
    text = '<doc id="1" url="u" title="A "b" c" language="en" revision="7">\nThe text.\n</doc>\n'
    assert fields(source(tmp_path, text)) == [{"title": 'A "b" c', "text": "The text."}]


def test_a_dump_cut_in_the_middle_is_counted_and_named(tmp_path: Path) -> None:
    whole = blocks()
    cut = whole[: whole.index("Bowie")]
    (bad,) = [found for found in everything(source(tmp_path, cut)) if isinstance(found, Rejected)]
    assert (bad.place, bad.reason) == ("line 12", "document without its end")
    assert bad.detail == '"Heroes" (album)'
    assert [row["title"] for row in fields(source(tmp_path, cut))] == ["Anarchism"]
    lines = objects()
    read = source(tmp_path, lines[: lines.index("Bowie")])
    assert rejected(read) == [("line 2", "malformed JSON")]


def test_a_document_that_begins_in_another_is_not_part_of_it(tmp_path: Path) -> None:
    text = blocks(ARTICLES[:1]).replace("</doc>\n", "") + blocks(ARTICLES[1:2]) + "lost\nwords\n"
    read = source(tmp_path, text)
    assert [row["title"] for row in fields(read)] == ['"Heroes" (album)']
    assert rejected(read) == [
        ("line 1", "document without its end"),
        ("line 18", "text outside of a document"),
    ]


def test_an_endless_line_costs_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "LONGEST_LINE", 100)
    articles = [("Long", "x" * 500), ("Short", "words")]
    read = source(tmp_path, blocks(articles))
    assert fields(read) == [{"title": "Short", "text": "words"}]
    assert [reason for _, reason in rejected(read)][1] == "document without all of its lines"


def test_undecodable_bytes_cost_their_document_alone(tmp_path: Path) -> None:
    read = source(tmp_path, "")
    data = blocks(ARTICLES[:2]).encode().replace(b"philosophy", b"\xff")
    (tmp_path / "AA" / "wiki_00").write_bytes(data)
    assert [row["title"] for row in fields(read)] == ['"Heroes" (album)']
    assert rejected(read) == [("line 1", "undecodable bytes")]


def test_articles_become_rows(tmp_path: Path) -> None:
    documents = corpus(tmp_path / "a.jsonl", 200)
    articles = [(document["title"], document["text"]) for document in documents]
    source(tmp_path, blocks(articles))
    files = {"kind": "wikipedia", "files": [f"{tmp_path}/*/wiki_*"]}
    rows = {"layout": "fields", "fields": {"title": 8, "text": 32}}
    data = prepared(tmp_path, "out", source=files, rows=rows)
    assert sum(split.rows for split in data.manifest.splits.values()) == 200
