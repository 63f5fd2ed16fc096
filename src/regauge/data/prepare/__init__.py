"""Preparation: reads, filters, splits and encodes the records of a source, and writes datasets.

Entry point: `prepare.prepare_datasets`. The phases are in `read_records.py` (with `filters.py`),
`split.py` (which also trains the tokenizer), `encode.py` and `write_shards.py`. `dataset_build.py`
runs the last two for one layout. `workdir.py` keeps unfinished work, so that a stopped job can
resume.

This package imports no torch. The formats that it writes are defined in `data`.
"""
