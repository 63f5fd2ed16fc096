"""Comparison of runs with a baseline: equal quality or not, the first divergence, and the cost.

Entry point: `compare.compare_runs`. `verdict` judges one pair of runs; `gaps` has the relative
differences and their limits. `cost` computes the cost to a target. `sentences` and
`first_divergence` write the results in words. This package does not import torch.
"""
