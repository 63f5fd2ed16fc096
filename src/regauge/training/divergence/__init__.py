"""Finds the first value in which two runs diverge, by replaying single steps.

- `replay.replay` computes steps again; this is the verb `replay`.
- `capture` records a step's values: inputs, activations, gradients and updates.
- `localize` compares captured steps, and finds the first difference beyond rounding.

The verb `compare --localize` combines them.
"""
