"""Fault tolerance: how a run's processes are started, watched and restarted.

Entry point: `supervisor.supervise`, which starts one attempt after another until the run ends.

| file | content |
| --- | --- |
| `supervisor` | the attempts of a run, and the restart policy |
| `attempt` | one attempt: start the processes, watch them, name the first failure |
| `channel` | files through which a supervisor and its processes communicate |
| `heartbeat`, `watchdog` | heartbeats in shared memory, and hang detection |
| `failures` | failure kinds, their policies, and error classification |
| `forks`, `forkserver` | a fork server that imports torch once for all processes |
| `signals`, `spot_notices` | SIGTERM, SIGINT and spot interruption notices |
| `nodes/` | the same on several nodes |
| `health/`, `faults/` | checks before a run, and faults to test it with |

A single-node supervisor does not import torch.
"""
