"""Launching: from a run file to the plan of a job, its checks, and the reading of its state.

| file | content |
| --- | --- |
| `settings` | the [launch] table |
| `job_spec` | the job of a run file: command, nodes, machine |
| `lints` | checks of a plan before it is submitted, each with its source |
| `progress` | the progress and the failure of a run, read from its output folder |

The launchers themselves are choices in `regauge.launchers`. Nothing here imports torch.
"""
