"""Run folders as data: settings, metric series, attempts, evaluation tables and their formatting.

Entry point: `run_folder.read_run_folder`. `series` merges the metrics of all attempts,
`evaluation_table` ranks the rows of an evaluation, `formatting` writes numbers for readers.
`comparison` and `reporting` build on this package. It imports no torch and nothing of either.
"""
