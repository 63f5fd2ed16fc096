"""Recipes: short run files for common jobs, filled in from a data file.

`settings.write_recipe` is the entry point. `data_file` reads a file's first records, and
`field_choice` chooses the fields for a job. This package does not import torch.
"""
