"""Model parallelism: one program on several devices of a machine, with a process for each device.

The entry point is `runner.ModelParallelRunner`, which runs rank 0 in the calling process.
`worker.py` starts and runs the processes of the other ranks. `plan.py` selects the layers that
tensor parallelism splits, and `shard.py` builds the shard of a rank. `group.py` is the process
group. This package may import `models`, `accelerators` and the interface of the backends.
"""
