"""Approximate nearest neighbors with faiss: clustered vectors, of which a query reads some.

The index uses one byte per number. It selects more rows than needed; the search ranks them by their
stored vectors, so the scores are exact.
"""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import numpy as np

from regauge.system.files import replace_atomically
from regauge.system.log import logger
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.serving.search.search_rows import SearchRows

CLUSTERS_PER_ROOT = 2
"""Clusters per square root of the row count. More of them take longer to compute."""
TRAINING_ROWS = 40
"""Rows per cluster for computing the centers; faiss warns about less than 39."""
TRAINING_ITERATIONS = 10


def is_available() -> bool:
    return importlib.util.find_spec("faiss") is not None


class ApproximateIndex:
    """A faiss index in a memory-mapped file."""

    def __init__(self, path: Path, probes: int) -> None:
        """Read an index from `write_index`; a query is compared with `probes` clusters."""
        import faiss

        self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        self._parameters = faiss.SearchParametersIVF()
        self._parameters.nprobe = probes

    def select_rows(self, query: np.ndarray, count: int) -> np.ndarray:
        """Return the numbers of about `count` rows that are probably near, in ascending order."""
        _, numbers = self._index.search(query[None], count, params=self._parameters)
        selected: np.ndarray = np.sort(numbers[0][numbers[0] >= 0])
        return selected


def write_index(rows: SearchRows, width: int, path: Path) -> None:
    """Build and write an index of all rows, unless the file exists."""
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
