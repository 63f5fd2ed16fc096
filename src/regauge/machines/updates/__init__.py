"""Catalog rows added by users, and current prices. Nothing here imports torch."""
