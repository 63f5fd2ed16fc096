"""Stateless random numbers: pure functions of a key.

A key is a tuple of integers, such as (seed, epoch, row). Calls share no state, so order, masks and
splits are the same for every world size, after every resume and with any number of workers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Words: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]"
"""64-bit words of any shape."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)


def mix_bits(words: Words) -> Words:
    """Scramble each 64-bit word with the SplitMix64 finalizer (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * FIRST_MULTIPLIER
        words = (words ^ (words >> np.uint64(27))) * SECOND_MULTIPLIER
    return words ^ (words >> np.uint64(31))


def hash_keys(*key: int | np.ndarray) -> Words:
    """Return one 64-bit word per key; arrays in the key are broadcast against each other."""
    word: Words = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in key:
            part_words = np.asarray(part).astype(np.int64).astype(np.uint64)
            word = mix_bits((word + GAMMA) ^ mix_bits(part_words + GAMMA))
    return word


def draw_uniform(*key: int | np.ndarray) -> np.ndarray:
    """Return one uniform number in [0, 1) per key, fp32 with 23 random bits."""
    numbers: np.ndarray = (hash_keys(*key) >> np.uint64(41)).astype(np.float32)
    return numbers * np.float32(2**-23)


class Permutation:
    """A permutation of 0 … size-1 with random access in constant memory.

    A balanced Feistel network with eight rounds over the next even number of bits. Values outside
    the range are permuted again until they fall inside (cycle walking; Black and Rogaway, 2002).
    """

    ROUNDS = 8

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = hash_keys(*key, np.arange(self.ROUNDS))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the values at the given positions, each in 0 … size-1."""
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
                left, right = right, left ^ (mix_bits(right + key) & self._mask)
        return (left << self._half) | right
