"""Fault injection: proves that a run survives the faults of a plan, or that bugs are detected.

Entry point: `faults.FaultInjector`, a hook of a training run. `bugs` holds the deliberate bugs of a
training stack. Training imports this package only if a plan is given (`--chaos`).
"""
