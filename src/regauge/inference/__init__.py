"""Compiled models: their export, the backends that compile them, and batch inference."""
