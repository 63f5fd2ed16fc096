"""Jobs on schedulers: the plan from a run file, its checks, its rehearsal and its progress.

| file | content |
| --- | --- |
| `settings` | the [launch] table |
| `job_spec` | the job of a run file, or the jobs of a pipeline: command, nodes, machine |
| `planning` | the plan of a job: the launcher of a target, its documents, and the price |
| `lints`, `lints_*` | checks of a plan before it is submitted, each with its source |
| `rehearsal`, `small_run` | a plan with small shapes on this machine, with the loss of a node |
| `job_progress` | the progress and the failure of a run, read from its output folder |

The launchers themselves are choices in `regauge.jobs.targets`. Nothing here imports torch.
"""
