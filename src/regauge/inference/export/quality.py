"""Compares a compiled program's outputs with fp32 outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.tasks import ITEMS

if TYPE_CHECKING:
    from regauge.models.io_spec import OutputKind

NUM_NEIGHBORS = 10
"""Nearest neighbors to compare per vector."""
NON_QUALITY_METRICS = frozenset({"loss", ITEMS, "calibration", "perplexity"})
MAX_ROUNDING_ITEMS = 5.0
"""Close held-out decisions that rounding alone may change."""
CHUNK_ROWS = 512
"""Texts per neighbor search."""


def quality_loss(
    outputs: np.ndarray, reference: np.ndarray, output_kind: OutputKind
) -> dict[str, float]:
    """Return how far outputs are from the reference, both [texts, width] fp32.

    `quality_loss` is the loss as a fraction; it is 1 if an output is not finite. By output kind:

    - vectors: 1 minus the mean cosine similarity; also the shared nearest neighbors
    - text: the fraction of reference tokens from the first one that differs
    - classes: the fraction of texts whose class differs
    - entities: the fraction of tokens whose class differs
    - values, scores, tensor: mean absolute difference, relative to the mean magnitude
    """
    row = {"max_abs_error": float(np.abs(outputs - reference).max(initial=0.0))}
    if not np.isfinite(outputs).all():
        return {**row, "quality_loss": 1.0}
    if output_kind == "vectors":
        cosines = cosine_similarity(outputs, reference)
        row |= {"mean_cosine": float(cosines.mean()), "min_cosine": float(cosines.min())}
        if len(outputs) > NUM_NEIGHBORS + 1:
            row[f"neighbor_overlap@{NUM_NEIGHBORS}"] = neighbor_overlap(outputs, reference)
        return {**row, "quality_loss": max(0.0, 1.0 - row["mean_cosine"])}
    if output_kind == "text":
        agreement = matching_prefix_fraction(outputs, reference)
        return {**row, "token_agreement": agreement, "quality_loss": 1.0 - agreement}
    if output_kind == "entities":
        is_token = reference[:, 1::2] > 0  # classes and probabilities alternate; 0 is padding
        matches = (outputs[:, ::2] == reference[:, ::2])[is_token]
        agreement = float(matches.mean()) if len(matches) else 1.0
        return {**row, "class_agreement": agreement, "quality_loss": 1.0 - agreement}
    if output_kind == "classes":
        agreement = float((outputs.argmax(1) == reference.argmax(1)).mean())
        return {**row, "class_agreement": agreement, "quality_loss": 1.0 - agreement}
    scale = float(np.abs(reference).mean()) or 1.0
    relative = float(np.abs(outputs - reference).mean()) / scale
    return {**row, "relative_error": relative, "quality_loss": relative}


def matching_prefix_fraction(outputs: np.ndarray, reference: np.ndarray) -> float:
    """Return the fraction of reference tokens before the first difference.

    Both are [texts, tokens]; negative ids are padding.
    """
    matches = np.cumprod(outputs == reference, axis=1)
    is_token = reference >= 0
    return float((matches * is_token).sum() / max(1, is_token.sum()))


def cosine_similarity(outputs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return each vector pair's cosine similarity, [rows]; 1 if both are zero."""
    norms = np.linalg.norm(outputs, axis=1) * np.linalg.norm(reference, axis=1)
    products = np.einsum("rw,rw->r", outputs, reference, dtype=np.float64)
    is_equal = np.equal(outputs, reference).all(1)
    cosines: np.ndarray = np.where(
        is_equal, 1.0, np.minimum(products / np.maximum(norms, 1e-30), 1.0)
    )
    return cosines


def neighbor_overlap(outputs: np.ndarray, reference: np.ndarray) -> float:
    """Return the fraction of nearest neighbors, by dot product, shared by both sets of vectors."""
    shared = 0
    for start in range(0, len(outputs), CHUNK_ROWS):
        neighbors = [_find_neighbors(vectors, start) for vectors in (outputs, reference)]
        shared += sum(len(np.intersect1d(*pair)) for pair in zip(*neighbors, strict=True))
    return shared / (NUM_NEIGHBORS * len(outputs))


def metrics_loss(metrics: dict[str, float], reference: dict[str, float]) -> float:
    """Return a quality metric's largest relative drop below the reference.

    The training loss and counts are not quality metrics. A drop by at most `MAX_ROUNDING_ITEMS`
    items is ignored, because rounding changes as many close decisions.
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


def _find_neighbors(vectors: np.ndarray, start: int) -> np.ndarray:
    """Return the nearest neighbor indices for a chunk, [rows, neighbors]."""
    scores = vectors[start : start + CHUNK_ROWS] @ vectors.T
    rows = np.arange(len(scores))
    scores[rows, start + rows] = -np.inf
    neighbors: np.ndarray = np.argpartition(-scores, NUM_NEIGHBORS, axis=1)[:, :NUM_NEIGHBORS]
    return neighbors
