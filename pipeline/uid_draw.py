"""Numbers drawn for a sample by its uid: the same in every run, on every machine, in any order."""

from __future__ import annotations

import numpy as np


def uniform(hi: np.ndarray, lo: np.ndarray, seed: int) -> np.ndarray:
    """float64 (n,) in [0, 1) for uids given as uint64 halves; another seed, other numbers.

    Three rounds of SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), for uids that only count up.
    """
    mixed = _mix(np.full(1, seed, np.uint64))
    for half in (hi, lo):
        mixed = _mix(mixed ^ half.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
