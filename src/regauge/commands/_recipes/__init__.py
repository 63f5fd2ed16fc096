"""Recipes: short run files for common jobs, filled in from a data file.

`writing.write_recipe` is the entry point. `data_file` reads a file's first records. `field_choice`
chooses the fields for a job, and `settings` builds the tables. This package does not import torch.
"""
