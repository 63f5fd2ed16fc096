"""Batch size finder: the fastest microbatch size that fits into the device memory.

Entry point: `finder.resolve_microbatch`. `memory` predicts the memory of a process on torch's meta
device. `trial` starts separate processes (`trial_worker`), which measure memory and throughput of
rising sizes. `finder` decides once for all processes, and records the decision.
"""
