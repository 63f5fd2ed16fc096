"""The vectors of all tokens of a text, for late interaction and for other poolings."""
