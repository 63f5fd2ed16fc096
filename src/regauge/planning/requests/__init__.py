"""The training run of a run file, as the planner needs it. Nothing here imports torch."""
