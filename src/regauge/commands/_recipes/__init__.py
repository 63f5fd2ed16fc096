"""Recipes: short run files for common jobs, filled in from a data file.

`writing.write_recipe` is the entry point. `data_file` reads the first records of a file.
`field_choice` chooses the fields of a job, and `settings` builds the tables. Nothing here imports
torch.
"""
