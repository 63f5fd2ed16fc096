"""Batch inference: files in, files out, in shards that resume after a kill.

Entry point: `predict.predict`. A job (`job`) reads a source's pieces; `shard_queue` splits them
into shards and hands these to an executor's workers (`executors/`). A worker (`worker`) reads,
computes and writes a shard (`shard`) with an artifact. `fields` infers the fields to read and to
keep, `progress` reports throughput and cost.
"""
