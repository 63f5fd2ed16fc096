"""Nearest-neighbor search over vectors written by `predict`.

A score is the dot product of query vector and row vector. Exact search compares the query with
every row. With many rows, a faiss index selects the rows to compare.
"""

from __future__ import annotations

import importlib.util
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import numpy as np

from regauge.serving.search.search_rows import SearchRows, VectorFolder, open_vectors, write_rows
from regauge.system.choices import did_you_mean
from regauge.system.errors import SettingsError
from regauge.system.files import replace_atomically
from regauge.system.log import logger
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from regauge.inference.export.artifact import Artifact
    from regauge.serving.search.search_settings import SearchSettings

TITLE_FIELDS, LINK_FIELDS = ("title", "name", "summary"), ("url", "link")
"""Field names for titles and links; the first one kept is used."""
MAX_TITLE_CHARACTERS = 120
CANDIDATES_PER_RESULT, MIN_CANDIDATES = 4, 100
"""Rows the approximate index selects per result, and the minimum per query."""
CLUSTERS_PER_ROOT = 2
"""Clusters per square root of the row count. More of them take longer to compute."""
TRAINING_ROWS = 40
"""Rows per cluster for computing the centers; faiss warns about less than 39."""
TRAINING_ITERATIONS = 10
DERIVED = "search"
"""Subfolder for derived files, in the vector folder."""


class RankedRows(NamedTuple):
    """The rows nearest to a query, by descending score."""

    numbers: np.ndarray
    """Row numbers, [results] int64."""
    scores: np.ndarray
    """Dot products, [results] fp32."""


class ResultFields(NamedTuple):
    """Kept fields shown in a result."""

    title: str | None
    link: str | None
    texts: tuple[str, ...]


class ApproximateIndex:
    """A faiss index in a memory-mapped file: clustered vectors, of which a query reads some.

    The index uses one byte per number. It selects more rows than needed; the search ranks them by
    their stored vectors, so the scores are exact.
    """

    def __init__(self, path: Path, probes: int) -> None:
        """Read an index from `_write_index`; a query is compared with `probes` clusters."""
        import faiss

        self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        self._parameters = faiss.SearchParametersIVF()
        self._parameters.nprobe = probes

    def select_rows(self, query: np.ndarray, count: int) -> np.ndarray:
        """Return the numbers of about `count` rows that are probably near, in ascending order."""
        _, numbers = self._index.search(query[None], count, params=self._parameters)
        selected: np.ndarray = np.sort(numbers[0][numbers[0] >= 0])
        return selected


class SearchIndex:
    """The rows of a prediction job, searched by query vector."""

    def __init__(
        self,
        rows: SearchRows,
        fields: ResultFields,
        settings: SearchSettings,
        approximate: ApproximateIndex | None = None,
    ) -> None:
        """Search in these rows; `approximate` selects candidates, if given."""
        self._rows = rows
        self._fields = fields
        self._max_characters = settings.max_text_characters
        self._approximate = approximate

    @classmethod
    def open(cls, settings: SearchSettings, artifact: Artifact) -> Self:
        """Open the index of the configured vectors, for an artifact's queries.

        The first call writes derived files, which later ones map. Raises SettingsError if the
        artifact does not return vectors, if the vectors belong to another artifact, or if a field
        was not kept. Raises DataError if files are damaged.
        """
        vectors = check_vectors(settings, artifact)
        fields = _select_fields(settings, vectors)
        folder = Path(settings.index_folder or vectors.folder / DERIVED)
        if settings.index_folder is None:
            _remove_old_files(folder, vectors.key)
        width = artifact.program.output_size
        path = folder / f"{vectors.key}.arrow"
        write_rows(vectors, path)
        rows = SearchRows(path, vectors.dtype, width)
        if not _needs_approximation(settings, len(rows)):
            return cls(rows, fields, settings)
        path = folder / f"{vectors.key}.faiss"
        _write_index(rows, width, path)
        return cls(rows, fields, settings, ApproximateIndex(path, settings.probes))

    def __len__(self) -> int:
        return len(self._rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._rows.close()

    @property
    def is_exact(self) -> bool:
        """Whether a query is compared with every row."""
        return self._approximate is None

    def search(self, query: np.ndarray, count: int) -> list[dict[str, Any]]:
        """Return the rows nearest to a query as JSON-ready results, best first.

        `query` is [width] fp32. A result has `rank`, `score`, `id`, `title`, `link` and `texts`.
        """
        numbers, scores = self.rank_rows(np.ascontiguousarray(query, np.float32), count)
        pairs = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [
            {"rank": rank, "score": round(score, 6), **self._describe_row(number)}
            for rank, (number, score) in enumerate(pairs, start=1)
        ]

    def rank_rows(self, query: np.ndarray, count: int) -> RankedRows:
        """Return the rows nearest to a query; equal scores are in row order."""
        if self._approximate is None:
            return _rank_all(self._rows, query, count)
        num_candidates = max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * count)
        numbers = self._approximate.select_rows(query, num_candidates)
        return _select_best(numbers, self._rows.read_vectors(numbers) @ query, count)

    def read_row(self, number: int) -> dict[str, Any]:
        """Return title, link and all kept fields of a row; raises IndexError."""
        return {**self._describe_row(number), "fields": self._rows.read_fields(number)}

    def _describe_row(self, number: int) -> dict[str, Any]:
        values = self._rows.read_fields(number)
        values = {name: value for name, value in values.items() if value is not None}
        shown = (name for name in self._fields.texts if name in values)
        texts = {name: text for name in shown if (text := str(values[name]).strip())}
        title = " ".join(str(values.get(self._fields.title or "") or "").split())
        title = title or next(map(_first_line, texts.values()), "") or f"Row {number}"
        return {
            "id": number,
            "title": _shorten(title, MAX_TITLE_CHARACTERS),
            "link": find_address(values.get(self._fields.link or "")),
            "texts": {name: _shorten(text, self._max_characters) for name, text in texts.items()},
        }


def find_address(value: object) -> str | None:
    """Return a value if it is a web address; a browser would run `javascript:` as code."""
    if not isinstance(value, str):
        return None
    try:
        parts = urlsplit(value.strip())
    except ValueError:
        return None
    return value.strip() if parts.scheme in {"http", "https"} and parts.netloc else None


def _rank_all(rows: SearchRows, query: np.ndarray, count: int) -> RankedRows:
    best = RankedRows(np.empty(0, np.int64), np.empty(0, np.float32))
    for start, vectors in rows.iterate_blocks():
        numbers = np.arange(start, start + len(vectors))
        block = _select_best(numbers, vectors @ query, count)
        numbers = np.concatenate([best.numbers, block.numbers])
        best = _select_best(numbers, np.concatenate([best.scores, block.scores]), count)
    return best


def _select_best(numbers: np.ndarray, scores: np.ndarray, count: int) -> RankedRows:
    """Return the rows with the highest finite scores; `numbers` must be sorted among equal ones."""
    is_finite = np.isfinite(scores)
    numbers, scores = numbers[is_finite], scores[is_finite]
    if len(scores) > count:
        # All rows with the lowest selected score stay, so that the order of the rows decides.
        threshold = scores[np.argpartition(scores, -count)[-count]]
        is_candidate = scores >= threshold
        numbers, scores = numbers[is_candidate], scores[is_candidate]
    order = np.argsort(-scores, kind="stable")[:count]
    return RankedRows(numbers[order], scores[order])


def _needs_approximation(settings: SearchSettings, num_rows: int) -> bool:
    is_large = num_rows >= settings.min_approximate_rows
    return (
        settings.approximate == "auto"
        and is_large
        and importlib.util.find_spec("faiss") is not None
    )


def _remove_old_files(folder: Path, key: str) -> None:
    """Remove derived files of replaced vectors."""
    for path in folder.glob("*"):
        if path.stem != key and path.suffix in {".arrow", ".faiss"}:
            with suppress(OSError):
                path.unlink()


def check_vectors(settings: SearchSettings, artifact: Artifact) -> VectorFolder:
    """Return the configured vectors; raises SettingsError unless they are an artifact's own."""
    if artifact.program.output_kind != "vectors":
        problem = f"{artifact.origin} returns {artifact.program.output_kind}, not vectors"
        raise SettingsError(problem, "search needs an artifact that embeds texts")
    vectors = open_vectors(Path(settings.vectors))
    if settings.allow_other_artifact or vectors.artifact_sha256 == artifact.content_sha256:
        return vectors
    problem = f"{vectors.folder} has vectors from another artifact than {artifact.origin}"
    remedy = "serve that artifact, or run 'regauge predict' with this one"
    raise SettingsError(problem, remedy)


def _select_fields(settings: SearchSettings, vectors: VectorFolder) -> ResultFields:
    """Return a result's fields; raises SettingsError if a configured one was not kept."""
    kinds = vectors.kept_fields
    named = (settings.title_field, settings.link_field, *settings.text_fields)
    for name in filter(None, named):
        if name not in kinds:
            problem = f"the vectors do not have a field '{name}'"
            remedy = did_you_mean(name, tuple(kinds)) if kinds else "predict with keep_fields"
            raise SettingsError(problem, remedy)
    title = settings.title_field or _find_first(TITLE_FIELDS, kinds)
    link = settings.link_field or _find_first(LINK_FIELDS, kinds)
    texts = tuple(
        name for name, kind in kinds.items() if kind == "text" and name not in {title, link}
    )
    return ResultFields(title, link, settings.text_fields or texts)


def _find_first(names: tuple[str, ...], kinds: dict[str, str]) -> str | None:
    return next((name for name in names if name in kinds), None)


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n")[0].split())


def _shorten(text: str, count: int) -> str:
    """Cut a text to `count` characters, with an ellipsis."""
    return text if len(text) <= count else text[:count].rstrip() + "…"


def _write_index(rows: SearchRows, width: int, path: Path) -> None:
    import faiss

    if path.is_file():
        return
    logger.info("Building the search index of %s", format_count(len(rows), "row"))
    max_clusters = max(1, len(rows) // TRAINING_ROWS)
    num_clusters = min(int(CLUSTERS_PER_ROOT * math.sqrt(len(rows))), max_clusters)
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(width),
        width,
        num_clusters,
        faiss.ScalarQuantizer.QT_8bit,
        faiss.METRIC_INNER_PRODUCT,
    )
    index.cp.niter = TRAINING_ITERATIONS
    index.train(_sample_rows(rows, TRAINING_ROWS * num_clusters))
    for _, block in rows.iterate_blocks():
        index.add(np.ascontiguousarray(block))
    with replace_atomically(path) as temporary:
        faiss.write_index(index, str(temporary))


def _sample_rows(rows: SearchRows, count: int) -> np.ndarray:
    """Return about `count` evenly spaced vectors, [rows, width] fp32."""
    step = max(1, len(rows) // count)
    samples = [block[-start % step :: step] for start, block in rows.iterate_blocks()]
    sample: np.ndarray = np.ascontiguousarray(np.concatenate(samples))
    return sample
