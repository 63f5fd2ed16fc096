"""Job plans before a run: memory, time, dollars, and machine choice.

`training_plan` and `inference_plan` apply the formulas in `memory_plan`, `step_time` and `network`
to a job and a machine. `run_plans` reads the job from a run file. Nothing here imports torch.
"""
