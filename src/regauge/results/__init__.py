"""What run folders contain: settings, metric series, evaluation tables, and their formatting.

Entry point: `run_folder.read`. `comparison` and `reporting` build on it; it imports no torch.
"""
