"""Nodes of a stage that trains on several machines: node 0 writes the pipeline records.

Each node runs the same command, `regauge pipeline FILE --until STAGE`. The other nodes only take
part in the training.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regauge.supervision.nodes.topology import is_whole_node
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.commands._stages import ResolvedStage

INDEX_VARIABLES = (
    "PET_NODE_RANK",
    "AWS_BATCH_JOB_NODE_INDEX",
    "JOB_COMPLETION_INDEX",
    "SLURM_NODEID",
)
"""Node number variables: torchrun, AWS Batch, Indexed Jobs, and `srun`."""


def is_follower(stage: ResolvedStage, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a node in a training stage other than the first."""
    settings = stage.settings
    if not isinstance(settings, TrainSettings):
        return False
    nodes = settings.execution.nodes
    return is_whole_node(nodes, environment) and read_node_index(environment) > 0


def read_node_index(environment: Mapping[str, str]) -> int:
    """Return this node's number, from the first variable in the environment; 0 without one."""
    values = [environment[name] for name in INDEX_VARIABLES if name in environment]
    return int(values[0]) if values and values[0].isdigit() else 0
