"""Server routes, one module per protocol; `PROTOCOLS` in `openapi.py` lists those served."""
