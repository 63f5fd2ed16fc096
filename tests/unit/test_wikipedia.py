"""Wikipedia extracts: both formats give the same articles; incomplete ones are rejected."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from regauge.data.sources import Rejected, _files
from regauge.data.sources.wikipedia import Wikipedia
from unit.preparing import prepare_dataset, write_corpus
from unit.reads import list_rejected, read_fields, read_items

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
def test_both_formats_have_the_same_articles(tmp_path: Path, form: type) -> None:
    read = source(tmp_path, form())
    assert read_fields(read) == [{"title": title, "text": text} for title, text in ARTICLES]
    assert not list_rejected(read)
    decoded = read_fields(source(tmp_path, form(), entities="decode"))
    assert decoded[0]["text"] == ARTICLES[0][1].replace("&lt;", "<")
    assert decoded[2] == {"title": "AT&T", "text": "A company & more."}


def test_folders_with_both_formats_are_read_in_order(tmp_path: Path) -> None:
    source(tmp_path, blocks(ARTICLES[:2]), "AA/wiki_00")
    source(tmp_path, "", "AA/wiki_01")
    read = source(tmp_path, objects(ARTICLES[2:]), "AB/wiki_00")
    (tmp_path / "AB" / "wiki_01.gz").write_bytes(gzip.compress(blocks(ARTICLES[:1]).encode()))
    titles = [row["title"] for row in read_fields(read)]
    assert titles == [title for title, _ in (*ARTICLES, ARTICLES[0])]
    assert len(read.list_pieces()) == 1


def test_a_title_may_be_followed_by_attributes(tmp_path: Path) -> None:
    text = '<doc id="1" url="u" title="A "b" c" language="en" revision="7">\nThe text.\n</doc>\n'
    assert read_fields(source(tmp_path, text)) == [{"title": 'A "b" c', "text": "The text."}]


def test_a_truncated_dump_is_rejected(tmp_path: Path) -> None:
    whole = blocks()
    cut = whole[: whole.index("Bowie")]
    (bad,) = [item for item in read_items(source(tmp_path, cut)) if isinstance(item, Rejected)]
    assert (bad.location, bad.reason) == ("line 12", "document without an end tag")
    assert bad.detail == '"Heroes" (album)'
    assert [row["title"] for row in read_fields(source(tmp_path, cut))] == ["Anarchism"]
    lines = objects()
    read = source(tmp_path, lines[: lines.index("Bowie")])
    assert list_rejected(read) == [("line 2", "malformed JSON")]


def test_a_document_within_another_one_is_separate(tmp_path: Path) -> None:
    text = blocks(ARTICLES[:1]).replace("</doc>\n", "") + blocks(ARTICLES[1:2]) + "lost\nwords\n"
    read = source(tmp_path, text)
    assert [row["title"] for row in read_fields(read)] == ['"Heroes" (album)']
    assert list_rejected(read) == [
        ("line 1", "document without an end tag"),
        ("line 18", "text outside of a document"),
    ]


def test_a_very_long_line_rejects_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "MAX_LINE_BYTES", 100)
    articles = [("Long", "x" * 500), ("Short", "words")]
    read = source(tmp_path, blocks(articles))
    assert read_fields(read) == [{"title": "Short", "text": "words"}]
    assert [reason for _, reason in list_rejected(read)][1] == "document with unreadable lines"


def test_undecodable_bytes_reject_only_their_document(tmp_path: Path) -> None:
    read = source(tmp_path, "")
    data = blocks(ARTICLES[:2]).encode().replace(b"philosophy", b"\xff")
    (tmp_path / "AA" / "wiki_00").write_bytes(data)
    assert [row["title"] for row in read_fields(read)] == ['"Heroes" (album)']
    assert list_rejected(read) == [("line 1", "undecodable bytes")]


def test_articles_become_rows(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "a.jsonl", 200)
    articles = [(document["title"], document["text"]) for document in documents]
    source(tmp_path, blocks(articles))
    files = {"kind": "wikipedia", "files": [f"{tmp_path}/*/wiki_*"]}
    rows = {"layout": "fields", "fields": {"title": 8, "text": 32}}
    data = prepare_dataset(tmp_path, "out", source=files, rows=rows)
    assert sum(split.rows for split in data.manifest.splits.values()) == 200
