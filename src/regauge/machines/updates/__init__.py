"""Rows that a user adds to the catalog, and current prices. Nothing here imports torch."""
