"""Measurements of artifacts (latency, throughput, cost) and of training at growing world sizes.

Entry points: `inference.run` and `training.document`. Each measurement runs in a process of its own
(`latency_worker`); `summary` computes the figures without measuring anything.
"""
