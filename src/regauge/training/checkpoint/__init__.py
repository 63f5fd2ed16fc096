"""Checkpoints that do not depend on the device or the world size, and are committed atomically.

The package may import `models`, `config`, `run_folders` and `system`.
"""
