"""The tokens that `LoadedModel.generate` decodes, for prompts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from regauge.inference.export.artifact import Artifact
from regauge.inference.export.engine import Engine, load_engine, select_buckets
from regauge.inference.export.generator import add_draws
from regauge.inference.export.records import TextRecords
from regauge.models.settings import Generation


def generate(
    artifact: Artifact, prompts: Sequence[np.ndarray], generation: Generation
) -> list[list[int]]:
    """Return the answers to prompts, in batches as `regauge generate` computes them."""
    runner = load_engine(artifact, batch_invariant=False, threads=1).runner
    artifact = replace(artifact, generation=generation)
    count = artifact.program.output_size
    records = add_draws(
        TextRecords.from_lists(list(prompts)), generation, np.arange(len(prompts)), count=count
    )
    runner.program.options = artifact.generation_options  # type: ignore[attr-defined]
    engine = Engine(runner, select_buckets(artifact, batch_invariant=False), count)
    return [row[row >= 0].astype(int).tolist() for row in engine.compute(records)]
