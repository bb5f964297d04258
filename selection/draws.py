"""Random draws that are pure functions of a key, the same bits on every platform and for every numpy.

Rounds must come out alike on any machine, any number of workers and any later day. numpy promises that for
the raw output of its bit generators but not for distributions: `Generator.hypergeometric`, `permutation` and
the rest may change their streams between versions (NEP 19), and `Generator.hypergeometric` refuses
populations of 10^9 or more. So the few draws that rounds need are made here from Philox4x32-10 (Salmon et
al., SC 2011) and nothing but integer operations and the correctly rounded float64 operations + - * / sqrt: no
logarithm, no gamma function, no sum whose order the processor chooses.

A *key* is a pair of uint64 arrays that hold 32 bits each; `derive` makes one per purpose, and every draw is a
function of (key, counter). All functions broadcast, so one call serves one shard or all of them.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Key = tuple[Words, Words]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))

# What the last counter word says, so that no two kinds of draw ever share a Philox block.
_DERIVE, _UNIFORM, _SHUFFLE = (np.uint64(kind) for kind in (1, 2, 3))

# Mass left outside the summed window of a hypergeometric is at most 2 exp(-_TAIL), below a uniform's 2^-53.
_TAIL = 40.0
# The window's first weight: far above the smallest double, far enough below the largest for any population.
_FIRST_WEIGHT = 1e-280
_CELLS = 1 << 18


def philox(
    key: Key, counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
) -> list[Words]:
    """Philox4x32-10: four words of 32 random bits for each (key, counter), as uint64 arrays.

    key: two arrays, counter: four, of integers below 2^32.
    """
    k0, k1 = key
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    for _ in range(10):
        product0, product1 = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def seed_key(seed: int) -> Key:
    """The key of a seed. Raises ValueError unless 0 <= seed < 2^64."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed}: an integer from 0 to 2^64 - 1")
    return np.asarray([seed & 0xFFFFFFFF], np.uint64), np.asarray([seed >> 32], np.uint64)


def derive(key: Key, purpose: int, first: npt.ArrayLike = 0, second: npt.ArrayLike = 0) -> Key:
    """An independent key for each (purpose, first, second); the arguments broadcast and are below 2^32.

    purpose goes in the high half of the last counter word, so it is below 2^16.
    """
    words = philox(key, (first, second, purpose, _DERIVE))
    return words[0], words[1]


def uniforms(key: Key, first: npt.ArrayLike, second: npt.ArrayLike = 0) -> Floats:
    """Uniform float64 in [0, 1) on a grid of 2^-53, one for each (key, first, second) after broadcasting."""
    words = philox(key, (first, second, 0, _UNIFORM))
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def shuffled(key: Key, stream: int, sizes: Ints) -> Ints:
    """One uniform permutation of range(size) for each segment, end to end.

    key: arrays that broadcast to (segments,), one key a segment; stream: below 2^32 (a shard's index); sizes:
    int64 (segments,), each below 2^32. Returns int64 (sizes.sum(),); the entries of segment i are numbers
    within that segment. Sorting by 32 random bits, ties by number: a pair's order is biased by less than
    2^-32.
    """
    blocks = -(-sizes // 4)
    segment = np.repeat(np.arange(len(sizes)), blocks)
    block = np.arange(len(segment)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    keys = tuple(np.broadcast_to(part, len(sizes))[segment] for part in key)
    words = np.stack(philox((keys[0], keys[1]), (block, stream, 0, _SHUFFLE)), axis=1).ravel()
    if len(sizes) == 1:
        numbered = words[: sizes[0]] << _SHIFT | np.arange(sizes[0], dtype=np.uint64)
        return (np.sort(numbered) & _LOW).astype(np.int64)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    words = words[np.repeat(4 * (np.cumsum(blocks) - blocks), sizes) + number]
    return number[np.lexsort((words, owner))]


def hypergeometric(uniform: Floats, good: Ints, bad: Ints, sample: Ints) -> Ints:
    """How many of `sample` entries drawn without replacement from good + bad are good, by inversion.

    uniform: float64 in [0, 1); good, bad, sample: int64 >= 0, sample <= good + bad < 2^53; all of one shape.
    Returns int64 of that shape.

    The pmf is summed over a window about the mean from the ratio of neighbours, p(x+1)/p(x) =
    (good-x)(sample-x) / ((x+1)(bad-sample+x+1)). A hypergeometric is a sum of independent indicators (Vatutin
    and Mikhailov, 1982), so Bernstein's inequality with its own variance bounds the mass outside; the
    rounding of the products stays below 1e-9 of a probability at 10^10 entries. Time and memory grow with the
    standard deviation: a few hundred cells at a shard, some 10^5 at the root of 10^10.
    """
    shape = uniform.shape
    uniform = uniform.ravel()
    good, bad, sample = (array.ravel() for array in (good, bad, sample))
    low, high = _window(good, bad, sample)
    drawn = low.copy()
    for rows in _chunks(high - low):
        summed = _cumulative(good[rows], bad[rows], sample[rows], low[rows], high[rows])
        sought = uniform[rows] * summed[:, -1]
        if len(rows) == 1:
            drawn[rows] += np.searchsorted(summed[0], sought)
        else:
            drawn[rows] += np.count_nonzero(summed < sought[:, None], axis=1)
    return drawn.reshape(shape)


def _cumulative(good: Ints, bad: Ints, sample: Ints, low: Ints, high: Ints) -> Floats:
    """Unnormalised cumulative pmf from low to high, constant after it; the first row is the widest."""
    g, b, n, x = (array[:, None].astype(np.float64) for array in (good, bad, sample, low))
    width = high - low
    steps = np.arange(int(width[0]), dtype=np.float64)
    summed = np.empty((len(width), len(steps) + 1))
    summed[:, 0] = _FIRST_WEIGHT
    ratio = summed[:, 1:]
    np.subtract(g - x, steps, out=ratio)
    ratio *= (n - x) - steps
    below = steps + (x + 1)
    below *= steps + (x + 1 + b - n)
    ratio /= below
    if width[-1] < width[0]:
        ratio *= steps < width[:, None]
    np.cumprod(summed, axis=1, out=summed)
    return np.cumsum(summed, axis=1, out=summed)


def _window(good: Ints, bad: Ints, sample: Ints) -> tuple[Ints, Ints]:
    """First and last value summed: the support, cut where Bernstein leaves 2 exp(-_TAIL) outside."""
    g, b, n = (array.astype(np.float64) for array in (good, bad, sample))
    total = np.maximum(g + b, 1.0)
    mean = n * (g / total)
    variance = mean * (b / total) * ((total - n) / np.maximum(total - 1.0, 1.0))
    reach = _TAIL / 3 + np.sqrt(_TAIL * _TAIL / 9 + 2 * _TAIL * variance)
    low = np.maximum(np.maximum(0, sample - bad), np.floor(mean - reach).astype(np.int64))
    high = np.minimum(np.minimum(sample, good), np.ceil(mean + reach).astype(np.int64))
    return low, high


def _chunks(width: Ints) -> Iterator[Ints]:
    """Indices of the rows with a width above 0, widest first, in groups of about _CELLS cells."""
    rows = np.flatnonzero(width)
    if len(rows) > 1:
        rows = rows[np.argsort(-width[rows], kind="stable")]
    start = 0
    while start < len(rows):
        stop = start + max(1, _CELLS // int(width[rows[start]] + 1))
        yield rows[start:stop]
        start = stop
