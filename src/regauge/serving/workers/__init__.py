"""The worker processes of a model.

`engine_worker` is a process that computes batches, and `worker_pool` sends them. `worker_group`
replaces processes that end; text generation has workers of its own with the same group.
"""
