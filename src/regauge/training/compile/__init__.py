"""Compilation of training graphs: whether to compile, warm-up, the graph cache, ahead of time.

Entry points: `decision.settle`, `warmup.warm_up` and `ahead`.
"""
