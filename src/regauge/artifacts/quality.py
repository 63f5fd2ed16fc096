"""How far the answers of a compiled program are from those of fp32, computed step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.tasks import ITEMS

if TYPE_CHECKING:
    from regauge.models.io_spec import Answers

NEIGHBOURS = 10
NO_QUALITY = frozenset({"loss", ITEMS, "calibration", "perplexity"})
CLOSE_ITEMS = 5.0
AT_A_TIME = 512
"""Texts whose neighbours are looked for at once."""


def differences(ours: np.ndarray, theirs: np.ndarray, answers: Answers) -> dict[str, float]:
    """Return how answers differ from the reference's, both [texts, width] fp32.

    Answers that are no numbers lose all. Of vectors their cosines, and the share of each one's
    nearest others that stays; of classes the share of texts with the same one. `loss` is the share
    of quality that these say is lost.
    """
    found = {"max_abs": float(np.abs(ours - theirs).max(initial=0.0))}
    if not np.isfinite(ours).all():
        return {**found, "loss": 1.0}
    if answers == "vectors":
        cosines = cosine(ours, theirs)
        found |= {"cosine": float(cosines.mean()), "cosine_least": float(cosines.min())}
        if len(ours) > NEIGHBOURS + 1:
            found[f"neighbours@{NEIGHBOURS}"] = overlap(ours, theirs)
        return {**found, "loss": max(0.0, 1.0 - found["cosine"])}
    if answers == "text":
        kept = told_alike(ours, theirs)
        return {**found, "same_tokens": kept, "loss": 1.0 - kept}
    if answers == "classes":
        same = float((ours.argmax(1) == theirs.argmax(1)).mean())
        return {**found, "same_class": same, "loss": 1.0 - same}
    scale = float(np.abs(theirs).mean()) or 1.0
    relative = float(np.abs(ours - theirs).mean()) / scale
    return {**found, "relative": relative, "loss": relative}


def told_alike(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return which share of the reference's tokens comes before the first that is another."""
    same = np.cumprod(ours == theirs, axis=1)
    real = theirs >= 0
    return float((same * real).sum() / max(1, real.sum()))


def cosine(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of vectors, [rows]; of two that are zero it is 1."""
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = np.einsum("rw,rw->r", ours, theirs, dtype=np.float64)
    same = np.equal(ours, theirs).all(1)
    found: np.ndarray = np.where(same, 1.0, np.minimum(products / np.maximum(norms, 1e-30), 1.0))
    return found


def overlap(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return which share of each vector's nearest others are so in both, by their products."""
    shared = 0
    for at in range(0, len(ours), AT_A_TIME):
        near = [_nearest(vectors, at) for vectors in (ours, theirs)]
        shared += sum(len(np.intersect1d(*pair)) for pair in zip(*near, strict=True))
    return shared / (NEIGHBOURS * len(ours))


def metrics_loss(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Return by which share the worst of the metrics of quality is below the reference's.

    The loss that was trained is none of them, and neither is a count. A share of items that is
    lower by as many as five of them says nothing: rounding turns that many that were close.
    """
    if any(np.isnan(ours[name]) and not np.isnan(theirs[name]) for name in theirs):
        return 1.0
    items = theirs.get(ITEMS, 0.0)
    lost = [
        (theirs[name] - ours[name]) / abs(theirs[name])
        for name in theirs
        if name not in NO_QUALITY
        and theirs[name]
        and (theirs[name] - ours[name]) * items > CLOSE_ITEMS
    ]
    return max([0.0, *lost])


def _nearest(vectors: np.ndarray, at: int) -> np.ndarray:
    scores = vectors[at : at + AT_A_TIME] @ vectors.T
    rows = np.arange(len(scores))
    scores[rows, at + rows] = -np.inf
    found: np.ndarray = np.argpartition(-scores, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    return found
