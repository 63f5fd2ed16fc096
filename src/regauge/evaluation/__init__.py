"""Evaluation of saved models and artifacts outside training runs, and reports on runs.

Entry points: `offline.evaluate_models` compares models and artifacts in one table;
`offline.compute_heldout_metrics` evaluates a compiled program during an export. Both use the
`training.heldout` evaluation path. `compare` compares runs, `benchmark` measures speed, and
`report` writes pages.
"""
