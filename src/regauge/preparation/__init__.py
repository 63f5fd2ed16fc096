"""Preparation of a dataset: read, filter, split, train a tokenizer, encode, write shards.

Entry point: `prepare.prepare`. This package imports no torch; the formats that it writes are
defined in `data`.
"""
