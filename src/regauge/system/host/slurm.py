"""Translates the environment variables of a Slurm `srun` task to torchrun's.

The names follow the srun manual, section "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT, NUM_PORTS = 20000, 20000
"""Range of the rendezvous port, which is computed from the job and the step."""


def build_torchrun_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task; the first node of the step is the master."""
    nodes = slurm["SLURM_STEP_NODELIST"]
    prefix, bracket, rest = nodes.partition(",")[0].partition("[")
    first_node = prefix + re.split(r"[-,\]]", rest)[0] if bracket else prefix
    job, step = int(slurm["SLURM_JOB_ID"]), int(slurm["SLURM_STEP_ID"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", slurm["SLURM_STEP_TASKS_PER_NODE"])[0],
        "MASTER_ADDR": first_node,
        "MASTER_PORT": str(FIRST_PORT + (job * 31 + step) % NUM_PORTS),
    }
