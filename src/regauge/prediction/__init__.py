"""Batch inference: files in, files out, in shards that survive a kill.

Entry point: `predict.predict`. A job (`job`) is split into shards (`shard_queue`), which the
workers of an executor (`executors/`) compute with an artifact.
"""
