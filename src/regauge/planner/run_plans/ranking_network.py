"""Parameters of the network that the task `rank` trains on the vectors of its texts.

The counts are tested against the real module. The step time ignores the products of the network. It
computes once for a candidate, and an encoder once for each token: a network of 1.3 million
parameters has 0.5 % of the products of MiniLM (10.6 million) with 24 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.models.settings import Interactions
from regauge.planner.run_plans.task_texts import read_task_texts

if TYPE_CHECKING:
    from regauge.planner.model_shape import ModelShape


@dataclass(frozen=True)
class RankingNetwork:
    """What the task `rank` trains besides one encoder."""

    query_texts: int
    document_texts: int
    numeric_features: int
    categorical_features: int
    is_calibrated: bool
    """Scores are logits of probabilities, because the objective is pointwise."""
    encoders: int
    """Encoders of texts: one, or one of queries and one of candidates."""
    interactions: Interactions

    def count_parameters(self, width: int) -> int:
        """Return the parameters besides those of the encoders, whose vectors have `width` values.

        A cross layer of width w has w² + w parameters; one of low rank r with e experts has
        e (w + 2 w r + r²) + w.
        """
        settings, texts = self.interactions, self.query_texts + self.document_texts
        features = texts * width + self.query_texts * self.document_texts
        features += 2 * self.numeric_features + self.categorical_features * settings.width
        table = (settings.buckets + 1) * max(self.categorical_features, 1) * settings.width
        cross = features * features + features
        if settings.rank is not None:
            expert = features + 2 * features * settings.rank + settings.rank**2
            cross = settings.experts * expert + features
        deep = sum(a * b + b for a, b in pairwise((features, *settings.hidden)))
        scored = settings.hidden[-1] if settings.hidden else features
        if settings.cross_layers and settings.hidden and settings.structure == "parallel":
            scored += features
        return table + settings.cross_layers * cross + deep + scored + self.is_calibrated


def read_ranking_network(table: Mapping[str, Any]) -> RankingNetwork | None:
    """Return the network of a task `rank`; None for another task.

    Raises SettingsError if the table `interactions` is invalid.
    """
    if table.get("kind") != "rank":
        return None
    texts = read_task_texts(table)
    interactions = config.build(
        Interactions, table.get("interactions") or {}, (), "task.interactions"
    )
    return RankingNetwork(
        len(texts.fields),
        len(texts.candidate_fields),
        len(table.get("numeric_features") or ()),
        len(table.get("categorical_features") or ()),
        table.get("objective") == "pointwise",
        2 if table.get("encoders") == "separate" else 1,
        interactions,
    )


def add_ranking_network(shape: ModelShape, network: RankingNetwork) -> ModelShape:
    """Return the shape of an encoder with the network, and with the second encoder if any."""
    others = network.count_parameters(shape.hidden)
    others += (network.encoders - 1) * shape.parameters()
    return replace(shape, other_parameters=others)
