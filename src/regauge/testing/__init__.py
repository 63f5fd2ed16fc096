"""Fault injection: what a fault plan does to a run, to prove that the run survives or is caught.

Entry point: `faults.FaultInjector`, a hook of a training run. `bugs` holds the deliberate bugs of a
training stack. Training imports this package only if a plan is given (`--chaos`). It may import
`hooks`, `config`, `models` and files below them, and nothing of training.
"""
