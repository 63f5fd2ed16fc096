"""A model's worker processes, for batches and for text generation.

`worker_pool` starts, watches and replaces them. `worker_process` is a process as the server sees
it, and `worker_main` is the main module of the process, whose model is in `engine_worker` or in
`text_generation`. `worker_requests` places workers on devices or cores.
"""
