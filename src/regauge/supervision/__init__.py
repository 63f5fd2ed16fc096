"""Fault tolerance: how a run's processes are started, watched and restarted.

Entry point: `supervisor.supervise`, which starts one attempt after another until the run ends.
`nodes/` does the same on several nodes. `health/` checks devices before a run, and `faults/`
injects faults to test it with. A single-node supervisor does not import torch.
"""
