"""Generation of text with causal models."""
