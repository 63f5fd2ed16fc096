"""The plans of the verb `plan`; nothing here imports another verb."""
