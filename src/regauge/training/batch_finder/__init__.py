"""Batch size finder: the largest microbatch that fits into device memory.

Entry point: `finder.settled`. Memory is predicted (`memory`), then measured in separate processes
(`trial`, `trial_worker`).
"""
