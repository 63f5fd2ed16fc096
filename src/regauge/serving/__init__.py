"""HTTP server for artifacts: requests are batched, scheduled and computed by worker processes.

`server` starts the processes and the HTTP application in `app`. A `model_version` tokenizes a
request's records, and a `scheduler` selects batches for the processes in `workers` to compute.
`routes` has one module per protocol.
"""
