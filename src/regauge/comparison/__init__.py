"""Comparison of runs: equal quality or not, where they diverge, and what each one cost.

Entry point: `compare.compared`. This package reads run folders through `results` and imports no
torch.
"""
