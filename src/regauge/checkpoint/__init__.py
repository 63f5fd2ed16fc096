"""Checkpoints that belong to no device and no world size, and that are whole or not there."""
