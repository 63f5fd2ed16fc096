"""Batch size finder: the fastest microbatch size that fits into device memory."""
