"""MinHash signatures, which estimate the similarity of texts, and bands that find likely pairs (LSH).

The similarity of two texts is the Jaccard index of their sets of n-grams (shingles): shared / all. Under a random
permutation both sets have the same smallest element with that probability (Broder 1997), so the share of equal elements
of two signatures estimates it, with a standard error of sqrt(s (1 - s) / num_permutations).

A signature is cut into b bands of r elements. Two texts of similarity s have an equal band with probability
1 - (1 - s^r)^b, an S-curve (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4). Equal bands are candidates
only: clusters.py compares their shingles. So b and r cost time or recall, never precision; `banding` takes
the longest bands by which 99 % of the pairs at the threshold still become candidates. With 128 permutations:

    threshold   b x r    a pair of similarity  0.3    0.5    0.6    0.7    0.8    0.9  meets with probability
    0.7         32 x 4                         .229   .873   .988   1      1      1
    0.8         21 x 6                         .015   .282   .633   .928   .998   1
    0.9         12 x 10                        .000   .012   .070   .291   .744   .994

The permutations are those of datasketch 2 ("affine32": h -> a h + b mod 2^32 with odd a, after murmur3's finaliser),
applied to a whole batch instead of one object per text; a test compares the signatures with that library's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np

from components.data.dedup.text_units import Hashes, Places, Small, mix_bits

MIN_RECALL: Final = 0.99
"""The share of pairs exactly at the threshold that must become candidates."""
_SEED: Final = 1


@dataclass(frozen=True)
class Banding:
    """Signatures are cut into num_bands bands of band_length elements each."""

    num_bands: int
    band_length: int

    def chance(self, similarity: float) -> float:
        """The probability that a pair of this similarity has an equal band."""
        return float(1.0 - (1.0 - similarity**self.band_length) ** self.num_bands)


def banding(similarity: float, num_permutations: int) -> Banding:
    """The longest bands (fewest candidates) that find pairs of this similarity with probability MIN_RECALL."""
    candidates = [
        bands
        for length in range(1, num_permutations + 1)
        if (bands := Banding(num_permutations // length, length)).chance(similarity) >= MIN_RECALL
    ]
    return candidates[-1] if candidates else Banding(num_permutations, 1)


def shingle_sets(hashes: Hashes, offsets: Places) -> tuple[Small, Places]:
    """(the distinct n-grams of each text as sorted 32-bit hashes, their offsets by text).

    32 bits are enough: of two texts with a thousand n-grams each, one pair in four thousand would share a false one.
    """
    texts = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    keys = np.sort(texts << np.uint64(32) | hashes >> np.uint64(32))
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    counts = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(offsets) - 1)
    return keys.astype(np.uint32), np.concatenate([[0], np.cumsum(counts)])


def signatures(shingles: Small, offsets: Places, num_permutations: int) -> Small:
    """The signature of each set, [num_permutations, num_sets]; no set may be empty."""
    minima = np.empty((num_permutations, len(offsets) - 1), np.uint32)
    if not len(shingles):
        return minima
    assert (np.diff(offsets) > 0).all(), "an empty set has no smallest element"
    values, permuted = _murmur_mixed(shingles), np.empty_like(shingles)
    factors, summands = permutations(num_permutations)
    for number in range(num_permutations):
        np.multiply(values, factors[number], out=permuted)
        np.add(permuted, summands[number], out=permuted)
        np.minimum.reduceat(permuted, offsets[:-1], out=minima[number])
    return minima


def band_keys(minima: Small, bands: Banding) -> Hashes:
    """Band hashes [num_bands, num_sets] of signatures: equal keys mean equal bands, up to collisions of 64 bits."""
    keys = np.zeros((bands.num_bands, minima.shape[1]), np.uint64)
    for band in range(bands.num_bands):
        for place in range(bands.band_length):
            keys[band] = mix_bits(keys[band] + minima[band * bands.band_length + place])
    return keys


@functools.lru_cache(maxsize=4)
def permutations(count: int) -> tuple[Small, Small]:
    """(odd factors, summands) of the affine permutations: those of datasketch's MinHash(count, seed=1)."""
    generator = np.random.RandomState(_SEED)
    factors = generator.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, generator.randint(0, 1 << 32, count, dtype=np.uint32)


def _murmur_mixed(values: Small) -> Small:
    """The finaliser of MurmurHash3 with 32 bits, a bijection (Appleby)."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
