"""The HTTP server of artifacts: requests are batched, scheduled and computed by worker processes.

`server` starts the processes and the HTTP application of `app`. A `model_version` tokenizes the
records of a request, and its `scheduler` selects the batches that the processes of `workers`
compute. `routes` has one module for each protocol.
"""
