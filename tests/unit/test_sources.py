"""Sources: every document once, independent of the pieces; invalid input is rejected."""

from __future__ import annotations

import gc
import gzip
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from regauge import config
from regauge.data.sources import Record, Rejected, _files
from regauge.data.sources._docstrings import split_docstring
from regauge.data.sources._files import find_files
from regauge.data.sources._suffixes import build_source_table
from regauge.data.sources.jsonl import JsonLines
from regauge.data.sources.parquet import Parquet
from regauge.data.sources.python_docs import PythonDocs
from regauge.data.sources.python_docs_search import PythonDocsSearch
from regauge.data.sources.text import Text
from regauge.system.errors import DataError, SettingsError
from unit.reads import list_rejected, read_fields, read_items, read_texts

BODY = " ".join(f"word{number}" for number in range(30))


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\n\nthree\n", "four"]),
        ("paragraph", ["one\ntwo", "three", "four"]),
        ("line", ["one", "two", "three", "four"]),
    ],
)
def test_a_document_is_a_file_a_paragraph_or_a_line(
    tmp_path: Path, document: str, expected: list[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")
    (tmp_path / "b.txt").write_bytes(b"four")
    source = config.build(Text, {"files": (f"{tmp_path}/*.txt",), "document": document})
    assert read_texts(source) == expected


def test_a_single_file_is_divided_into_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \nthree\n")
    assert read_texts(Text(files=(f"{tmp_path}/*.txt",))) == ["one\ntwo", "three"]
    (tmp_path / "b.txt").write_text("four\n\nfive")
    assert read_texts(Text(files=(f"{tmp_path}/*.txt",))) == [
        "one\ntwo\n\n \nthree\n",
        "four\n\nfive",
    ]
    divided = Text(files=(f"{tmp_path}/*.txt",), document="paragraph")
    assert read_texts(divided) == ["one\ntwo", "three", "four", "five"]
    files = tuple(f"{tmp_path}/{name}.txt" for name in "ab")
    entries = [{"kind": "text", "files": (file,)} for file in files]
    several = config.parse_choice("data/sources", {"kind": "several", "sources": tuple(entries)})
    assert read_texts(several) == ["one\ntwo", "three", "four", "five"]


def test_undecodable_bytes_reject_only_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\xfe\nfine\n")
    source = Text(files=(f"{tmp_path}/a.txt",), document="line")
    assert read_texts(source) == ["good", "fine"]
    assert list_rejected(source) == [("line 2", "undecodable bytes")]
    assert list_rejected(Text(files=(f"{tmp_path}/a.txt",), document="file")) == [
        ("the whole file", "undecodable bytes")
    ]


def test_pieces_of_a_large_file_have_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{number} " + "x" * (number % 700)}) for number in range(9000)]
    path.write_text("\n".join(lines) + "\n")
    source = JsonLines(files=(str(path),), chunk_mib=1)
    sizes = [piece.bytes for piece in source.list_pieces()]
    assert len(sizes) == path.stat().st_size // 2**20 + 1 > 2
    assert max(sizes) - min(sizes) <= 1
    assert read_texts(source) == [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_piece_may_start_at_any_byte(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\ncdef\n\nghi\n")
    (piece,) = _files.group_files([_files.stat_file(path)], 100)
    halves = (piece._replace(stop=cut), piece._replace(start=cut))
    lines = [line.data for half in halves for _, line in _files.read_lines(half)]  # type: ignore[union-attr]
    assert lines == [b"ab", b"cdef", b"", b"ghi"]


@pytest.mark.parametrize("text", ['[\n{"text": "a"},\n{"text": "b"}\n]\n', '  [ {"text": "a"}]'])
def test_a_json_array_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"a JSON array, .*: jq -c '.\\[\\]' {path}"):
        read_items(JsonLines(files=(str(path),)))


def test_invalid_lines_are_rejected_with_their_location(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good, bad = (
        b'{"text": "fine", "label": 3, "score": 0.5, "none": NaN, "big": 9223372036854775808}',
        b'{"te',
    )
    lines = [b"[1, 2]", good, bad, b'[{"text": "b"}]', b'{"text": "\xff"}', b"", good, b"["]
    path.write_bytes(b"\n".join(lines))
    source = JsonLines(files=(str(path),))
    assert read_fields(source) == [{"text": "fine", "label": 3, "score": 0.5, "big": 2**63}] * 2
    assert list_rejected(source) == [
        ("line 1", "not a JSON object"),
        ("line 3", "malformed JSON"),
        ("line 4", "not a JSON object"),
        ("line 5", "undecodable bytes"),
        ("line 8", "malformed JSON"),
    ]


def test_a_very_long_line_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"a\n" + b"x" * 1000 + b"\nb\n")
    source = Text(files=(f"{tmp_path}/a.txt",), document="line")
    assert read_texts(source) == ["a", "b"]
    assert [location for location, _ in list_rejected(source)] == ["line 2"]


def test_compressed_files_have_the_same_lines(tmp_path: Path) -> None:
    data = b"".join(b'{"text": "number %d"}\n' % number for number in range(3000))
    half = len(data) // 2
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "plain.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.jsonl.zst").write_bytes(pack(data[:half]) + pack(data[half:]))
    names = ("plain.jsonl", "a.jsonl.gz", "a.jsonl.zst")
    plain, gz, zst = (read_texts(JsonLines(files=(f"{tmp_path}/{name}",))) for name in names)
    assert plain == gz == zst
    assert len(plain) == 3000


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_a_truncated_file_is_rejected(tmp_path: Path, name: str) -> None:
    data = b"".join(b"line number %d\n" % number for number in range(100_000))
    packed = gzip.compress(data) if name == "a.gz" else zstandard.ZstdCompressor().compress(data)
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    source = Text(files=(f"{tmp_path}/{name}",), document="line")
    (bad,) = list_rejected(source)
    assert bad[1] == "damaged compressed file"
    assert len(read_texts(source)) < 100_000
    whole = Text(files=(f"{tmp_path}/{name}",), document="file")
    assert list_rejected(whole) == [("the whole file", "damaged compressed file")]


def test_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": [f"row {number}" for number in range(10)],
            "kind": pa.array(["a", "b"] * 5).dictionary_encode(),
            "label": list(range(10)),
            "score": [0.5] * 10,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    source = Parquet(files=(f"{tmp_path}/*.parquet",))
    assert len(source.list_pieces()) == 3
    assert read_fields(source)[5] == {"text": "row 5", "kind": "b", "label": 5, "score": 0.5}
    text_source = Parquet(files=(f"{tmp_path}/*.parquet",), columns=("text",))
    first = read_items(text_source)[0]
    assert isinstance(first, Record)
    assert first.fields == {"text": "row 0"}
    with pytest.raises(DataError, match="no column 'txt'"):
        read_items(Parquet(files=(f"{tmp_path}/*.parquet",), columns=("txt",)))


def test_a_damaged_parquet_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is none")
    source = Parquet(files=(f"{tmp_path}/a.parquet",))
    assert [reason for _, reason in list_rejected(source)] == ["damaged Parquet file"]


def test_a_pattern_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        Text(files=(f"{tmp_path}/*.txt",)).list_pieces()
    with pytest.raises(DataError, match="is a folder"):
        Text(files=(str(tmp_path),)).list_pieces()


NAMES = st.from_regex(r"[ab1\[\]*?!~ {}-]{0,6}[ab1\]]", fullmatch=True)
"""Names with the special characters of patterns; none is `**`, which matches every folder."""


@given(names=st.sets(NAMES, min_size=1, max_size=4), data=st.data())
def test_a_path_that_exists_as_written_is_that_file(names: set[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            (Path(root) / name).mkdir()
            (Path(root) / name / f"{name}.txt").write_text("a", encoding="utf-8")
        name = data.draw(st.sampled_from(sorted(names)))
        expected = [f"{root}/{name}/{name}.txt"]
        for pattern in (f"{root}/{name}/{name}.txt", f"{root}/{name}/*.txt", f"{root}/{name}/**"):
            assert [file.name for file in find_files((pattern,))] == expected
        all_files = sorted(f"{root}/{name}/{name}.txt" for name in names)
        assert [file.name for file in find_files((f"{root}/**/*.txt",))] == all_files


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    (before,) = Text(files=(str(path),)).list_pieces()
    path.write_text("one and two")
    (after,) = Text(files=(str(path),)).list_pieces()
    assert before.stamp != after.stamp


def test_python_docs_reads_every_documented_object(tmp_path: Path) -> None:
    write_python_files(tmp_path)
    items = read_items(PythonDocs(roots=(str(tmp_path),)))
    records = {item.location: item.fields for item in items if isinstance(item, Record)}
    assert list(records) == [
        "mod", "mod.Class", "mod.Class.method", "mod.hidden", "mod.later", "topic assert"
    ]  # fmt: skip
    assert records["mod.Class"] == {
        "text": f"Do the thing\nthat is asked.\n\n{BODY}",
        "summary": "Do the thing that is asked.",
        "body": BODY,
    }
    assert records["mod.hidden"]["summary"] == records["mod.hidden"]["body"] == ""
    assert records["topic assert"]["summary"] == 'The "assert" statement'
    assert [item.reason for item in items if isinstance(item, Rejected)] == [
        "invalid Python source"
    ]


def test_python_docs_finds_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    write_python_files(tmp_path / "elsewhere" / "inside")
    (tmp_path / "elsewhere" / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    whole = read_items(PythonDocs(roots=(str(tmp_path / "elsewhere"),)))
    assert read_items(PythonDocs(roots=("package/elsewhere",))) == whole
    below = read_items(PythonDocs(roots=("package/elsewhere/inside",)))
    assert below == read_items(PythonDocs(roots=(str(tmp_path / "elsewhere" / "inside"),)))
    with pytest.raises(
        DataError, match=r"no package 'nowhere' is installed; correct source\.roots"
    ):
        PythonDocs(roots=("package/nowhere",)).list_pieces()
    with pytest.raises(DataError, match=r"no folder .*elsewhere/outside; correct source\.roots"):
        PythonDocs(roots=("package/elsewhere/outside",)).list_pieces()


def test_python_docs_can_have_qualified_names(tmp_path: Path) -> None:
    for name in ("pack/__init__.py", "pack/sub/__init__.py", "pack/sub/mod.py", "alone/mod.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Module {name}."""\ndef function():\n    """Function {name}."""\n')
    write_python_files(tmp_path)
    source = PythonDocs(roots=(str(tmp_path),), qualified_names=True)
    assert source.field_names() == ("text", "summary", "body", "name")
    records = [item.fields for item in read_items(source) if isinstance(item, Record)]
    names = {str(record["text"]).partition("\n")[0]: record["name"] for record in records}
    assert names["Module pack/__init__.py."] == "pack"
    assert names["Function pack/__init__.py."] == "pack.function"
    assert names["Function pack/sub/__init__.py."] == "pack.sub.function"
    assert names["Module pack/sub/mod.py."] == "pack.sub.mod"
    assert names["Function alone/mod.py."] == "mod.function"
    assert "topic assert" in names.values()


def test_python_docs_restores_the_garbage_collector(tmp_path: Path) -> None:
    write_python_files(tmp_path)
    source = PythonDocs(roots=(str(tmp_path),))
    for item in source.read(source.list_pieces()[0]):
        assert gc.isenabled(), item
    gc.disable()
    try:
        read_items(source)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_settings_limit_the_pairs_of_python_docs(tmp_path: Path) -> None:
    write_python_files(tmp_path)
    source = PythonDocs(roots=(str(tmp_path),), min_summary_words=6)
    summaries = {item.location: item.fields["summary"] for item in read_items(source)
                 if isinstance(item, Record)}  # fmt: skip
    assert summaries["mod.Class"]
    assert not summaries["topic assert"]
    short = PythonDocs(roots=(str(tmp_path),), max_summary_words=5)
    assert not any(
        item.fields["summary"]
        for item in read_items(short)
        if isinstance(item, Record) and item.location == "mod.Class"
    )


@pytest.mark.parametrize(
    ("text", "summary", "body"),
    [
        ("One line.", "One line.", ""),
        ("Title\n=====\n\nThe rest\nof it.", "Title", "The rest\nof it."),
        ("Two\nlines.\n\n    code\n\nend", "Two lines.", "    code\n\nend"),
    ],
)
def test_a_docstring_is_split_after_its_first_paragraph(text: str, summary: str, body: str) -> None:
    assert split_docstring(text) == (summary, body)


def test_a_misspelt_source_or_key_gets_a_suggestion() -> None:
    with pytest.raises(SettingsError, match="did you mean 'jsonl'"):
        config.parse_choice("data/sources", "jsnl")
    with pytest.raises(SettingsError, match="did you mean 'document'"):
        config.parse_choice("data/sources", {"kind": "text", "files": ("a",), "documnt": "line"})


def write_python_files(folder: Path) -> None:
    (folder / "mod.py").write_text(
        f'''"""A module."""
class Class:
    """Do the thing
    that is asked.

    {BODY}
    """
    def method(self):
        """Do it."""
def bare(): ...
if True:
    def hidden():
        """Short one.

        Too short."""
    try:
        async def later(): "Later, \\d in one line."
    except ImportError: ...
'''
    )
    (folder / "broken.py").write_text('"""No Python."""\ndef (')
    (folder / "tests").mkdir()
    (folder / "tests" / "passed.py").write_text('"""Passed over."""')
    (folder / "pydoc_data").mkdir()
    topic = f'The "assert" statement\n**********************\n\n{BODY}\n'
    (folder / "pydoc_data" / "topics.py").write_text(f"topics = {{'assert': {topic!r}}}\n")


SOURCE = '''
"""Reads and writes of every kind.

{body}
"""
class Tool{number}:
    def run(self, first, *, second=1):
        """Turn part {number} of the {word} machine.

        The {word} machine has many parts; part {number} is turned by hand, slowly and with care,
        until the {word} lamp behind it begins to glow and every other lamp has gone out for good.
        """
'''


def build_search_source(folder: Path, count: int = 12) -> PythonDocsSearch:
    for number in range(count):
        word = ("paper", "water", "cotton")[number % 3]
        text = SOURCE.format(number=number, word=word, body=f"It says {word} " * 12)
        (folder / f"tool{number}.py").write_text(text.lstrip())
    return PythonDocsSearch(roots=(str(folder),), queries=8, candidates=4)


def test_candidates_include_the_correct_body_and_share_words(tmp_path: Path) -> None:
    source = build_search_source(tmp_path)
    (piece,) = source.list_pieces()
    records = [item.fields for item in source.read(piece) if isinstance(item, Record)]
    queries = [record["query"] for record in records]
    starts = [index for index in range(len(queries)) if queries[index] != queries[index - 1]]
    assert len(starts) == len(set(queries)) == 8, "the candidates of a query are not consecutive"
    positions = set()
    for start in starts:
        group = records[start : start + 4]
        assert {record["query"] for record in group} == {queries[start]}
        assert [record["label"] for record in group].count(1) == 1
        positions.add([record["label"] for record in group].index(1))
        correct = next(record for record in group if record["label"])
        word = str(correct["query"]).split()[-2]
        if correct["kind"] == "function":
            assert correct["parameters"] == 3
            assert correct["depth"] == 2
            shares_word = [word in str(record["document"]) for record in group]
            assert sum(shares_word) == 4, "other candidates share no words"
        assert 0 <= float(correct["overlap"]) <= 1
    assert len(positions) > 1, "the correct candidate is always at the same position"
    assert set(source.field_names()) == {name for record in records for name in record}


def test_the_search_source_is_deterministic(tmp_path: Path) -> None:
    source = build_search_source(tmp_path)
    (piece,) = source.list_pieces()
    assert list(source.read(piece)) == list(source.read(piece))


CONLL = """-DOCSTART- -X- O O

EU NNP I-NP B-ORG
rejects VBZ I-VP O
# NN I-NP O

Peter NNP I-NP B-PER
Blackburn NNP I-NP I-PER
"""
CONLLU = """# newdoc id = n01
# text = Don't go.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVBP\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_

# sent_id = 2
1\t#\t#\tSYM\tNN\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize(
    ("name", "text", "fields", "expected"),
    [
        (
            "a.conll",
            CONLL,
            {},
            [
                {"tokens": ["EU", "rejects", "#"], "tags": ["B-ORG", "O", "O"]},
                {"tokens": ["Peter", "Blackburn"], "tags": ["B-PER", "I-PER"]},
            ],
        ),
        (
            "a.txt",
            CONLL.replace("\n", "\r\n"),
            {"words": 0, "pos": 1},
            [
                {"words": ["EU", "rejects", "#"], "pos": ["NNP", "VBZ", "NN"]},
                {"words": ["Peter", "Blackburn"], "pos": ["NNP", "NNP"]},
            ],
        ),
        (
            "a.conllu",
            CONLLU,
            {},
            [
                {"tokens": ["Do", "n't", "go"], "tags": ["AUX", "PART", "VERB"]},
                {"tokens": ["#"], "tags": ["SYM"]},
            ],
        ),
        ("a.conll", "one O\ntwo B-X\n", {}, [{"tokens": ["one", "two"], "tags": ["O", "B-X"]}]),
        ("a.conll", "\n\n", {}, []),
    ],
)
def test_a_sentence_of_conll_is_a_record(
    tmp_path: Path, name: str, text: str, fields: dict[str, int], expected: list[dict[str, object]]
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    table = {"kind": "conll", "files": (f"{tmp_path}/{name}",), "fields": fields}
    read = config.parse_choice("data/sources", table)
    assert read_fields(read) == expected
    assert not list_rejected(read)


def test_a_sentence_without_a_tag_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("one O\ntwo\n\nthree O\n\nfour\n")
    read = config.parse_choice("data/sources", build_source_table(f"{tmp_path}/a.conll"))
    assert read_fields(read) == [{"tokens": ["three"], "tags": ["O"]}]
    reason = "wrong number of columns"
    assert list_rejected(read) == [("line 1", reason), ("line 6", reason)]


def write_collection(folder: Path, qrels: str) -> Path:
    (folder / "qrels").mkdir()
    corpus = [
        {"_id": "d1", "title": "One", "text": "first text"},
        {"_id": "d2", "text": "second"},
        {"_id": 3, "title": "", "text": "third"},
        {"text": "without id"},
    ]
    queries = [{"_id": "q1", "text": "a query"}, {"_id": "q2", "text": "another"}]
    for name, lines in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "qrels" / "test.tsv").write_text(qrels)
    return folder


@pytest.mark.parametrize(
    "qrels",
    [
        "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\t3\t0\nq2\td2\t1\nq2\td9\t1\nq2\tx\n",
        "q1 0 d1 2\nq1 0 3 0\nq2 0 d2 1\nq2 0 d9 1\nq2 x\n",
    ],
)
def test_judged_pairs_of_a_search_benchmark_are_records(tmp_path: Path, qrels: str) -> None:
    read = config.parse_choice(
        "data/sources", build_source_table(str(write_collection(tmp_path, qrels)))
    )
    pairs = [
        {"query_id": "q1", "document_id": "d1", "score": 2}
        | {"query": "a query", "document": "One first text"},
        {"query_id": "q2", "document_id": "d2", "score": 1}
        | {"query": "another", "document": "second"},
    ]
    assert read_fields(read) == pairs
    reasons = [reason for _, reason in list_rejected(read)]
    assert sorted(reasons) == ["no judgment", "no text with an id", "no text with this id"]
    graded = read_fields(read.model_copy(update={"min_score": 0}))
    assert [record["score"] for record in graded] == [2, 0, 1]
    with pytest.raises(DataError, match=r"dev\.tsv.*; correct source\.folder or source\.split"):
        read.model_copy(update={"split": "dev"}).list_pieces()
