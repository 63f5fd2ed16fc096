"""The plans of the verbs `plan` and `train --dry-run`; nothing here imports another verb."""
