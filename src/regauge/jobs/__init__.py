"""Jobs on schedulers: plan a run file, check and rehearse the plan, and follow the job.

| file | content |
| --- | --- |
| `settings` | the [launch] table |
| `job_spec` | run file or pipeline -> job: command, nodes, machine |
| `planning` | job -> plan: the target's launcher, documents and price |
| `lints`, `lints_*` | plan checks before submission; `lints.csv` has their messages |
| `rehearsal`, `small_run` | run a plan on this machine with small shapes and a lost node |
| `job_progress` | progress and failures, read from the output folder |

The launchers themselves are choices in `regauge.jobs.targets`. Nothing here imports torch.
"""
