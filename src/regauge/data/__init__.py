"""Datasets: reads records and prepared datasets, and builds the batches of a step.

Sources (`sources/`) read the records of files, and row layouts (`layouts/`) turn records into rows.
`prepare/` writes a dataset with `tokenizer`, `packing`, `columns` and `duplicates`. Entry points of
training: `mixture.open_data` opens a dataset or a mixture,
`mixture.build_row_order` orders its rows, and `loader.BatchLoader` loads batches. `dataset.py`
defines the format on disk.

Nothing here imports torch.
"""
