"""Answers of trained models: artifacts, what is proved of them, and batches in their shapes."""
