"""Finds the first value in which two runs diverge, by replaying single steps.

- `replay.replay` computes steps of a run again; this is the verb `replay`.
- `capture` records the values of a step: inputs, activations, gradients and updates.
- `localize` compares captured steps, and finds the first difference that rounding does not explain.

The verb `compare --localize` combines them.
"""
