"""What a run leaves on disk: settings, metrics, attempts, costs, checkpoints, and their readers.

`config/output_files.py` has the file names, `documents` the file formats. `run_folder` reads a
whole run for reports, `run_tail` the ends of its files during the run. `series` merges metrics from
all attempts, `checkpoint_files` defines a checkpoint, `evaluation_table` ranks evaluation rows, and
`formatting` writes numbers for readers. Nothing here imports torch.
"""
