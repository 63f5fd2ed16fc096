"""Batch size finder: the fastest microbatch size that fits into device memory.

Entry points: `finder.resolve_microbatch`, and `model_size.describe_model` for a dry run.
`model_size` predicts weight and moment memory without importing torch. `memory` measures
activations on torch's meta device. `trial` starts separate processes (`trial_worker`) to measure
memory and throughput for rising sizes. `finder` decides once for all processes, and records the
decision.
"""
