"""Text generation with causal models."""
