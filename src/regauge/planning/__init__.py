"""What hardware there is, what it can do and what it costs; nothing here imports torch."""
