"""What a run leaves on disk: settings, metrics, attempts, costs, checkpoints, and their readers.

Entry point: `run_folder.read_run_folder`. `series` merges the metrics of all attempts,
`checkpoint_files` defines a checkpoint, `evaluation_table` ranks the rows of an evaluation, and
`formatting` writes numbers for readers. Nothing here imports torch.
"""
