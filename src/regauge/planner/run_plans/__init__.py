"""Plans of the training run of a run file: memory, time, dollars, and the choice of machines.

`run_request` reads the run file, and `option_search` finds machines and settings. Nothing
here imports torch or numpy.
"""
