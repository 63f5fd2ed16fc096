"""Batch size finder: the fastest microbatch size that fits into the device memory.

Entry points: `finder.resolve_microbatch`, and `model_size.describe_model` for a dry run.
`model_size` predicts the memory of weights and moments, and imports no torch. `memory` measures
activations on torch's meta device. `trial` starts separate processes (`trial_worker`), which
measure memory and throughput of rising sizes. `finder` decides once for all processes, and records
the decision.
"""
