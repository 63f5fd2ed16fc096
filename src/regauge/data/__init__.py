"""Datasets: reads records and prepared datasets, and builds the batches for a step.

Sources (`sources/`) read records from files, and row layouts (`layouts/`) turn records into rows.
`prepare/` writes a dataset with `tokenizer`, `packing`, `columns` and `duplicates`. Entry points
for training: `mixture.open_data` opens a dataset or a mixture, `mixture.build_row_order` orders the
rows, and `loader.BatchLoader` loads batches. `dataset.py` defines the format on disk.

Nothing here imports torch.
"""
