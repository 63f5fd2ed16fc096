"""What a run leaves on disk: settings, metrics, attempts, costs, checkpoints, and their readers.

`config/output_files.py` has the names of the files, `documents` their shapes. `run_folder` reads a
whole run for reports, `run_tail` the ends of its files while it runs. `series` merges metrics of
all attempts, `checkpoint_files` defines a checkpoint, `evaluation_table` ranks the rows of an
evaluation, and `formatting` writes numbers for readers. Nothing here imports torch.
"""
