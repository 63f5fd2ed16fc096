"""Compare the outputs of a compiled program with the outputs of fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.tasks import ITEMS

if TYPE_CHECKING:
    from regauge.models.io_spec import OutputKind

NUM_NEIGHBOURS = 10
"""Nearest neighbours of a vector that are compared."""
NON_QUALITY_METRICS = frozenset({"loss", ITEMS, "calibration", "perplexity"})
MAX_ROUNDING_ITEMS = 5.0
"""Held-out items that rounding alone may change: those that were close to a decision."""
CHUNK_ROWS = 512
"""Texts whose neighbours are searched at once."""


def quality_loss(
    outputs: np.ndarray, reference: np.ndarray, output_kind: OutputKind
) -> dict[str, float]:
    """Return how far outputs are from the reference, both [texts, width] fp32.

    `loss` is the quality loss as a fraction; it is 1 if an output is not finite. By output kind:

    - vectors: 1 minus the mean cosine similarity; also the shared nearest neighbours
    - text: the share of reference tokens from the first one that differs
    - classes: the share of texts whose class differs
    - values, scores, tensor: mean absolute difference, relative to the mean magnitude
    """
    row = {"max_abs": float(np.abs(outputs - reference).max(initial=0.0))}
    if not np.isfinite(outputs).all():
        return {**row, "loss": 1.0}
    if output_kind == "vectors":
        cosines = cosine_similarity(outputs, reference)
        row |= {"cosine": float(cosines.mean()), "cosine_least": float(cosines.min())}
        if len(outputs) > NUM_NEIGHBOURS + 1:
            row[f"neighbours@{NUM_NEIGHBOURS}"] = neighbour_overlap(outputs, reference)
        return {**row, "loss": max(0.0, 1.0 - row["cosine"])}
    if output_kind == "text":
        share = matching_prefix_share(outputs, reference)
        return {**row, "same_tokens": share, "loss": 1.0 - share}
    if output_kind == "classes":
        share = float((outputs.argmax(1) == reference.argmax(1)).mean())
        return {**row, "same_class": share, "loss": 1.0 - share}
    scale = float(np.abs(reference).mean()) or 1.0
    relative = float(np.abs(outputs - reference).mean()) / scale
    return {**row, "relative": relative, "loss": relative}


def matching_prefix_share(outputs: np.ndarray, reference: np.ndarray) -> float:
    """Return the share of the reference's tokens before the first one that differs.

    Both are [texts, tokens]; negative ids are padding.
    """
    matches = np.cumprod(outputs == reference, axis=1)
    is_token = reference >= 0
    return float((matches * is_token).sum() / max(1, is_token.sum()))


def cosine_similarity(outputs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of each pair of vectors, [rows]; 1 if both are zero."""
    norms = np.linalg.norm(outputs, axis=1) * np.linalg.norm(reference, axis=1)
    products = np.einsum("rw,rw->r", outputs, reference, dtype=np.float64)
    is_equal = np.equal(outputs, reference).all(1)
    cosines: np.ndarray = np.where(
        is_equal, 1.0, np.minimum(products / np.maximum(norms, 1e-30), 1.0)
    )
    return cosines


def neighbour_overlap(outputs: np.ndarray, reference: np.ndarray) -> float:
    """Return the share of nearest neighbours, by dot product, that both sets of vectors have."""
    shared = 0
    for start in range(0, len(outputs), CHUNK_ROWS):
        neighbours = [_find_neighbours(vectors, start) for vectors in (outputs, reference)]
        shared += sum(len(np.intersect1d(*pair)) for pair in zip(*neighbours, strict=True))
    return shared / (NUM_NEIGHBOURS * len(outputs))


def metrics_loss(metrics: dict[str, float], reference: dict[str, float]) -> float:
    """Return the largest relative drop of a quality metric below the reference.

    The training loss and counts are not quality metrics. A drop of at most `MAX_ROUNDING_ITEMS`
    items is ignored, because rounding changes that many close decisions.
    """
    if any(np.isnan(metrics[name]) and not np.isnan(reference[name]) for name in reference):
        return 1.0
    items = reference.get(ITEMS, 0.0)
    drops = [
        (reference[name] - metrics[name]) / abs(reference[name])
        for name in reference
        if name not in NON_QUALITY_METRICS
        and reference[name]
        and (reference[name] - metrics[name]) * items > MAX_ROUNDING_ITEMS
    ]
    return max([0.0, *drops])


def _find_neighbours(vectors: np.ndarray, start: int) -> np.ndarray:
    """Return the indices of the nearest neighbours of a chunk, [rows, neighbours]."""
    scores = vectors[start : start + CHUNK_ROWS] @ vectors.T
    rows = np.arange(len(scores))
    scores[rows, start + rows] = -np.inf
    neighbours: np.ndarray = np.argpartition(-scores, NUM_NEIGHBOURS, axis=1)[:, :NUM_NEIGHBOURS]
    return neighbours
