"""Evaluation of saved models and artifacts on held-out rows, outside of a training run.

Entry points: `offline.evaluate_models` compares models and artifacts in one table;
`artifact_metrics.compute_heldout_metrics` evaluates a compiled program during an export. Both use
the evaluation path of `training.heldout`. May import `artifacts`, `training`, `data` and `models`.
"""
