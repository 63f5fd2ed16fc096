"""Model parallelism: one program on several devices of a machine, with a process for each device.

The entry point is `runner.ModelParallelRunner`, which runs rank 0 in the calling process.
`worker.py` starts and runs the other ranks' processes. `plan.py` selects the layers that tensor
parallelism splits, and `shard.py` builds a rank's shard. `group.py` is the process group.
"""
