"""Benchmarks of artifacts (latency, throughput, cost) and of training at growing world sizes.

Entry points: `inference.run`, and `training.build_short_run` with `training.build_document`.
`latency_worker` measures one artifact in a separate process with the loops of `load_generator`.
`summary` computes medians, ratios and costs; it measures nothing. `settings` imports no torch.
"""
