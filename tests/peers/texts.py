"""Texts of one word up to more tokens than any limit, and the lines that they are made of."""

from __future__ import annotations

LINES = (
    "the river rises in the hills and runs to the sea",
    "a lamp burns in the window of the old house all night",
    "nobody knows who painted the door of the library blue",
    "trains leave at seven and at nine and the last one at ten",
    "she writes numbers in a notebook and adds them in her head",
    "rain falls on the roof while the cat sleeps near the stove",
    "they measured the bridge twice before they built the second one",
    "bread needs flour water salt and time and so do good friends",
)
TEXTS = (
    "the river",
    "a",
    "Nobody KNOWS who painted it",
    "trains leave at seven, and at nine.",
    " bread needs  flour ",
    "numbers 12 and 345",
    "unknowable zebra quartz",
    "the cat sleeps near the stove\nwhile rain falls",
    "they measured the bridge twice before they built the second one",
    "she adds them in her head",
    " ".join(LINES[:2]),
    " ".join(LINES[3:]),
    " ".join(reversed(" ".join(LINES).split())),
    "the " * 100,
    "salt and time",
    "blue door, old house: a lamp",
)
"""Sixteen texts of one word up to more tokens than any limit."""
QUERIES = tuple(reversed(TEXTS))
"""First texts of pairs; the second ones are TEXTS."""
