"""Randomness without state: numbers that are a pure function of their key.

A key is a tuple of integers, such as (seed, epoch, row). Nothing here remembers what was drawn,
so order, masks and splits are the same on any world, after any resume, with any worker count.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Words: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]"

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """Return each 64-bit word scrambled: the finaliser of SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * FIRST
        words = (words ^ (words >> np.uint64(27))) * SECOND
    return words ^ (words >> np.uint64(31))


def keyed(*key: int | np.ndarray) -> Words:
    """Return one 64-bit word per key; arrays in the key are broadcast against each other."""
    word: Words = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in key:
            part_words = np.asarray(part).astype(np.int64).astype(np.uint64)
            word = mix((word + GAMMA) ^ mix(part_words + GAMMA))
    return word


class Permutation:
    """A permutation of 0 … size-1 with random access in constant memory.

    A balanced Feistel network of eight rounds over the next even number of bits; values outside of
    the range are walked on until they fall inside (cycle walking, Black and Rogaway 2002).
    """

    ROUNDS = 8

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = keyed(*key, np.arange(self.ROUNDS))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the values at positions, each in 0 … size-1."""
        values = self._scramble(positions.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._scramble(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _scramble(self, values: Words) -> Words:
        left, right = values >> self._half, values & self._mask
        with np.errstate(over="ignore"):
            for key in self._keys:
                left, right = right, left ^ (mix(right + key) & self._mask)
        return (left << self._half) | right
