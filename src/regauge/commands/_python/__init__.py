"""The Python API: every verb as a function.

`functions.py` builds the function of a verb, `results.py` has the types of the results, and
`records.py` writes data objects of a program to files. It may import every other package; only
`regauge/__init__.py` imports it, at the first use of a function.
"""
