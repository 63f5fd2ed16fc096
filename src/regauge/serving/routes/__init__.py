"""Server routes, one module per protocol."""
