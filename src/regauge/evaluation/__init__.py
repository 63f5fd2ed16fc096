"""Evaluation of saved models and artifacts on held-out rows, outside of a training run.

Entry points: `offline.measure` for models, `artifact_metrics.metrics` for compiled programs. Both
use the evaluation path of `training.heldout`.
"""
