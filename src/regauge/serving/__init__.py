"""The HTTP server of artifacts: requests are batched, scheduled and computed by worker processes.

`server` starts the processes and the HTTP application of `app`. A `served_model` tokenizes the
records of a request, and its `scheduler` selects the batches that the processes of `worker_pool`
compute. `routes` has one module for each protocol. May import `artifacts`, `data` and `models`.
"""
