"""Serves models on a Ray cluster."""
