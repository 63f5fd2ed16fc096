"""Benchmarks of artifacts, servers, and training at growing world sizes.

Entry points: `inference.run`, `serving.run`, and `training.build_short_run` with
`training.build_document`. `latency_worker` measures one artifact in a separate process, and
`load_processes` a server. The `*_summary` modules compute the figures in a document; `summary`
contains what all benchmarks share. Settings modules do not import torch.
"""
