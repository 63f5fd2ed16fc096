"""Reference values: row columns computed with the weights of step 0, once per run.

A task names them in `reference_columns`, such as DPO's log-probabilities. No second model is in
memory. Entry point: `add_references.add_references`, before a checkpoint is loaded.
"""
