"""Vectors of all tokens in a text, for late interaction and other poolings."""
