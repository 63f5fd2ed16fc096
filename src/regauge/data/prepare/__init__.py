"""Preparation: reads, filters, splits and encodes a source's records, and writes datasets.

Entry point: `prepare.prepare_datasets`. The phases are in `read_records.py`, `split.py` (which also
trains the tokenizer), `encode.py` and `write_shards.py`. `dataset_build.py` runs the last two for
one layout. `workdir.py` keeps unfinished work, so that a stopped job can resume.

Does not import torch. `data` defines the formats written here.
"""
