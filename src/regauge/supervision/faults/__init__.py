"""Fault injection: proves that a run survives planned faults, or that bugs are detected.

Entry point: `faults.FaultInjector`, a training hook. `bugs` holds the deliberate training bugs.
Training imports this package only if a plan is given (`--chaos`).
"""
