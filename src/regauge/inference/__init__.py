"""Compiled models: export, compiler backends, and batch inference."""
