"""What Slurm says of a task of `srun`, in the variables that torchrun sets.

The names are those of the srun manual, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_PORT, PORTS = 20000, 20000
"""Where the processes of a Slurm step meet: a port that follows from job and step."""


def torchrun_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task; the first node of the step is the host."""
    nodes = slurm["SLURM_STEP_NODELIST"]
    prefix, bracket, rest = nodes.partition(",")[0].partition("[")
    first = prefix + re.split(r"[-,\]]", rest)[0] if bracket else prefix
    job, step = int(slurm["SLURM_JOB_ID"]), int(slurm["SLURM_STEP_ID"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", slurm["SLURM_STEP_TASKS_PER_NODE"])[0],
        "MASTER_ADDR": first,
        "MASTER_PORT": str(FIRST_PORT + (job * 31 + step) % PORTS),
    }
