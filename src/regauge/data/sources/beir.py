"""A search benchmark in a folder: corpus.jsonl, queries.jsonl and qrels/<split>.tsv.

The format of BEIR, https://github.com/beir-cellar/beir/wiki/Load-your-custom-dataset. The judgments
may also have TREC's four columns: query, iteration, document, grade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.data.sources import Piece, Record, Rejected, Source, _files
from regauge.data.values import parse_integer
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from regauge.data.values import Value

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
TREC_COLUMNS = 4
Judgments = dict[str, dict[str, int]]
"""Query id -> document id -> grade."""


class Beir(Source):
    """Pairs of a query and a judged document; the document begins with its title."""

    peer_names: ClassVar[tuple[str, ...]] = ("mteb", "msmarco", "trec", "qrels")

    folder: str
    """Folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv; a path or a URL."""
    split: str = "test"
    """Name of the file in `qrels`."""
    min_score: int = 1
    """Lowest grade of a pair; 0 also reads documents judged as not relevant, for rankers."""

    def field_names(self) -> tuple[str, ...]:
        return ("query_id", "document_id", "query", "document", "score")

    def list_pieces(self) -> tuple[Piece, ...]:
        names = [self._name(name) for name in (CORPUS, QUERIES, f"qrels/{self.split}.tsv")]
        try:
            return (_files.build_piece(*(_files.find_files((name,))[0] for name in names)),)
        except DataError as error:
            remedy = "correct source.folder or source.split"
            raise DataError(error.problem, remedy) from None

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the judged pairs by query; texts that are missing are rejected."""
        rejected: list[Rejected] = []
        judgments = self._read_judgments(piece.files[2], rejected)
        names = {name for grades in judgments.values() for name in grades}
        queries = _read_texts(piece.files[1], rejected, judgments.keys())
        documents = _read_texts(piece.files[0], rejected, names)
        yield from rejected
        for query, grades in judgments.items():
            for document, score in grades.items():
                location = f"query {query}, document {document}"
                if score < self.min_score:
                    continue
                if query not in queries or document not in documents:
                    yield Rejected(piece.files[2], location, "no text with this id")
                else:
                    fields: dict[str, Value] = {
                        "query_id": query,
                        "document_id": document,
                        "query": queries[query],
                        "document": documents[document],
                        "score": score,
                    }
                    yield Record(piece.files[2], location, fields)

    def read_collection(self) -> tuple[dict[str, str], dict[str, str], Judgments]:
        """Return queries and documents by id, and all judgments; raises DataError for bad lines."""
        (piece,) = self.list_pieces()
        rejected: list[Rejected] = []
        judgments = self._read_judgments(piece.files[2], rejected)
        documents, queries = (_read_texts(name, rejected) for name in piece.files[:2])
        if rejected:
            first, others = rejected[0], len(rejected) - 1
            problem = f"{first.file}, {first.location}: {first.reason}"
            raise DataError(f"{problem}, and {others} more such lines", "correct or remove them")
        return queries, documents, judgments

    def _name(self, name: str) -> str:
        return f"{self.folder.rstrip('/')}/{name}"

    def _read_judgments(self, name: str, rejected: list[Rejected]) -> Judgments:
        """Return the grades, by query and document; a first line without one is a header."""
        judgments: Judgments = {}
        for line in _files.read_file_lines(name):
            if isinstance(line, Rejected):
                rejected.append(line)
                continue
            values = line.split_columns()
            if len(values) == TREC_COLUMNS:
                del values[1]
            try:
                query, document, grade = values
                score = parse_integer(grade.strip())
            except ValueError:
                text = line.data.decode(errors="surrogateescape")
                if text.strip() and line.location != "line 1":
                    rejected.append(Rejected(name, line.location, "no judgment", text[:80]))
            else:
                judgments.setdefault(query, {})[document] = score
        return judgments


def _read_texts(
    name: str, rejected: list[Rejected], selected: Collection[str] | None = None
) -> dict[str, str]:
    """Return the texts, or the selected ones, by id; a title precedes the text."""
    texts = {}
    for item in _files.read_json_lines(name, _files.read_file_lines(name), ()):
        if isinstance(item, Rejected):
            rejected.append(item)
            continue
        parts = [item.fields.get(key, "") for key in ("title", "text")]
        if "_id" not in item.fields or not all(isinstance(part, str) for part in parts):
            rejected.append(Rejected(name, item.location, "no text with an id"))
        elif selected is None or str(item.fields["_id"]) in selected:
            texts[str(item.fields["_id"])] = " ".join(map(str, parts)).strip()
    return texts
