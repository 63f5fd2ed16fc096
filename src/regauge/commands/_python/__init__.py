"""The Python API: every verb as a function.

`functions.py` builds a verb's function, `results.py` has the result types, and `records.py` writes
a program's data objects to files. It may import every other package; only `regauge/__init__.py`
imports it, when a function is first used.
"""
