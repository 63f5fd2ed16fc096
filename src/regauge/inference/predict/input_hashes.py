"""Identifies the pieces of a source by their content, so that an equal copy continues a job.

jobs/0-of-1/input_hashes.json   hash of each input file, with its size and modification time
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.data.content_hashes import HASH_DIGITS, ContentHashes
from regauge.data.sources._files import hash_stats, stat_file
from regauge.inference.predict.job import JOB, JOBS
from regauge.system.log import logger

if TYPE_CHECKING:
    from regauge.data.sources import Piece
    from regauge.inference.predict.job import PredictJob

CACHE = "input_hashes.json"
MIN_LOGGED_BYTES = 10 * 2**30
"""Bytes of input files from which on their hashing is logged, because it takes a while."""


class InputHashes:
    """The identities of the pieces of a job."""

    def __init__(self, job: PredictJob) -> None:
        """Read the hashes that the jobs of the output folder have stored."""
        self._job = job
        self._hashes = ContentHashes(sorted((job.folder / JOBS).glob(f"*/{CACHE}")))

    def identify_pieces(self) -> dict[str, list[Any]]:
        """Return the size and the identity of each piece by its name.

        A piece of local files is identified by their content, any other piece by its stamp.
        """
        pieces = self._job.pieces
        if (num_bytes := sum(piece.bytes for piece in pieces)) > MIN_LOGGED_BYTES:
            logger.info("Hashing the input files: %.0f GiB", num_bytes / 2**30)
        local = {piece.name: files for piece in pieces if (files := _stat_files(piece))}
        hashes = self._hashes.hash_files(file for files in local.values() for file in files)
        return {
            piece.name: [
                piece.bytes,
                _combine(piece.files, hashes) if piece.name in local else piece.stamp,
            ]
            for piece in pieces
        }

    def describe_pieces(self) -> dict[str, list[Any]]:
        """Return the identities for a comparison with `job.json`; without one, reads no file."""
        if (self._job.folder / JOB).exists():
            return self.identify_pieces()
        return {piece.name: [piece.bytes, piece.stamp] for piece in self._job.pieces}

    def save(self) -> None:
        """Store the hashes for the next command; the job must have its folder."""
        self._hashes.save(self._job.job_folder / CACHE)


def _stat_files(piece: Piece) -> list[Any]:
    """Return the files of a piece whose stamp depends on nothing but local files."""
    paths = [Path(name) for name in piece.files]
    if not all(path.is_file() for path in paths):
        return []
    files = [stat_file(path) for path in paths]
    return files if hash_stats(files) == piece.stamp else []


def _combine(names: tuple[str, ...], hashes: dict[str, str]) -> str:
    content = "".join(f"{name}\0{hashes[name]}\n" for name in names)
    return hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]
