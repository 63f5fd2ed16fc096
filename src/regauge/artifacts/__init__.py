"""Compiled models with their evidence: how an artifact is made, checked, opened and queried.

Entry points: `export.export` writes an artifact, `model.Loaded` answers from one. Backends compile;
this package chooses among them. It may import data, models, backends and accelerators.
"""
