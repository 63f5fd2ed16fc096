"""Batch inference: files in, files out, in shards that are resumed after a kill.

Entry point: `predict.predict`. A job (`job`) reads the pieces of a source; `shard_queue` splits
them into shards and hands these to the workers of an executor (`executors/`). A worker
(`worker`) reads, computes and writes a shard (`shard`) with an artifact. `fields` infers the
fields to read and to keep, `progress` reports throughput and cost.
"""
