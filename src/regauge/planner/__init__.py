"""Plans of jobs before they run: memory, time, dollars, and the machines to choose.

`training_plan` and `inference_plan` apply the formulas of `memory_plan`, `step_time` and `network`
to a job and a machine. `run_plans` reads the job from a run file. Nothing here imports torch.
"""
