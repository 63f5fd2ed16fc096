"""Reference values: columns of rows that are computed with the weights of step 0, once per run.

A task names them in `reference_columns`, such as the log-probabilities of DPO. No second model is
in memory. Entry point: `add_references.add_references`, before a checkpoint is loaded.
"""
