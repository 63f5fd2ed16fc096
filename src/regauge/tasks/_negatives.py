"""Which texts in a batch are not negatives for a query or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from regauge.tasks._retrieval import find_equal, find_matches, query_slices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class TextGroups(NamedTuple):
    """Text columns in a batch, [groups, rows, width] each; rows have one group of texts."""

    query: Tensor
    documents: tuple[Tensor, ...]
    negatives: tuple[Tensor, ...]

    @property
    def candidates(self) -> Tensor:
        """All rows' documents, then their hard negatives, [groups, texts, width]."""
        return torch.cat([*self.documents, *self.negatives], 1)


def find_excluded_candidates(hashes: TextGroups, real: Tensor, queries: slice) -> Tensor:
    """Mask candidates that are not negatives for some queries, [groups, queries, texts].

    These are texts in padding rows, documents in rows with an equal query, texts equal to a
    document of the query, and hard negatives equal to a document in a row with an equal query.
    `real` is [groups, rows].
    """
    same_query = find_equal(hashes.query, queries)
    padding = (real == 0)[:, None]
    columns = []
    for candidates in hashes.documents:
        excluded = padding | same_query
        for documents in hashes.documents:
            excluded = excluded | find_matches(documents[:, queries], candidates)
        columns.append(excluded)
    columns += [padding | mask for mask in _find_relevant_negatives(hashes, same_query)]
    return torch.cat(columns, 2)


def find_excluded_queries(hashes: TextGroups, real: Tensor, rows: slice) -> tuple[Tensor, ...]:
    """Mask queries that are not negatives for the documents in some rows.

    These are queries in padding rows, equal queries, and queries in rows with an equal document.
    Each document in a row has a mask, [groups, rows, queries].
    """
    excluded = (real == 0)[:, None] | find_equal(hashes.query, rows)
    masks = []
    for document in hashes.documents:
        mask = excluded
        for others in hashes.documents:
            mask = mask | find_matches(document[:, rows], others)
        masks.append(mask)
    return tuple(masks)


def _find_relevant_negatives(hashes: TextGroups, same_query: Tensor) -> Iterator[Tensor]:
    """Yield which hard negatives equal a document of an equal query, [groups, queries, rows]."""
    for negatives in hashes.negatives:
        relevant = torch.zeros_like(same_query)
        for documents in hashes.documents:
            for part in query_slices(documents.shape[1]):
                equal = find_matches(documents[:, part], negatives)
                relevant |= (same_query[..., part].float() @ equal.float()) > 0
        yield relevant
