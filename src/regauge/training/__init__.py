"""Training: from run settings to the final models.

Entry point: `run.attempt`, which starts or resumes a run on this process. In execution order:

- `settings`, `dry_run`, `resolve` (`defaults`, `warm_start`, `run_record`): what is computed.
- `run_setup` builds a `RunContext` (`context`) and a `TrainState` (`state`); `task_runtime` builds
  the parts of each task.
- `trainer` is the loop: `optimizer`, `gradients`, `guards`, `metrics`, `ledger`,
  `heldout`, `generation`, `checkpointing`.
- `export_models` writes the final models.
"""
