"""Where two runs diverge: replay of single steps, capture of activations, deliberate bugs.

Entry points: `replay.replay` and `localize`.
"""
