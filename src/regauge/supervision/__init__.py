"""Fault tolerance of a run: how its processes are started, watched and restarted.

Entry point: `supervisor.supervise`, which starts one attempt after another until the run ends.

| file | content |
| --- | --- |
| `supervisor` | the attempts of a run, and the restart policy |
| `attempt` | one attempt: start the processes, watch them, name the first failure |
| `channel` | the files by which a supervisor and its processes communicate |
| `heartbeat`, `watchdog` | heartbeats in shared memory, and hang detection |
| `failures` | the kinds of failure, their policies, and the classification of errors |
| `forks`, `forkserver` | a fork server that imports torch once for all processes |
| `signals`, `spot_notices` | SIGTERM, SIGINT and spot interruption notices |
| `folder_lock` | one writer per output folder |
| `cost_meter`, `goodput` | cost and productive share of all attempts |
| `nodes/` | the same on several nodes |

A single-node supervisor imports no torch. The package may import `health`, `checkpoint` and files
below them, and nothing of `training` at run time.
"""
