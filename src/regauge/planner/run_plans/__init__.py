"""Plan a run file's training run: memory, time, dollars, and machine choice.

`run_request` reads the run file, and `option_search` finds machines and settings. Nothing here
imports torch or numpy.
"""
