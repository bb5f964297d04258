"""How many entries of each stratum a round takes: exact, and fair over the rounds."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import numpy as np

from selection.draws import Ints


def round_size(entries: int, ratio: str | float | Decimal | Fraction) -> tuple[Fraction, int]:
    """(the ratio as the decimal it was written as, k): k = ratio x entries rounded half up, in exact
    arithmetic.

    0.15 means 15/100, not the binary double nearest to it. Raises ValueError unless 0 < ratio <= 1 and k >=
    1.
    """
    try:
        exact = ratio if isinstance(ratio, Fraction) else Fraction(Decimal(str(ratio)))
    except (InvalidOperation, ValueError, OverflowError):
        raise ValueError(f"ratio={ratio!r}: a number above 0 and at most 1") from None
    if not 0 < exact <= 1:
        raise ValueError(f"ratio={ratio}: above 0 and at most 1")
    size = (2 * exact * entries + 1) // 2
    if size < 1:
        raise ValueError(
            f"ratio={ratio}: a round of {entries} entries would be empty; at least {0.5 / max(entries, 1):g}"
        )
    return exact, int(size)


class Quotas:
    """Entries of each stratum taken by each round: proportional, summing to k, no stratum left behind.

    The quota of stratum c is q_c = k N_c / N. Every round takes floor(q_c) or ceil(q_c) of it, the ones left
    over going to the largest remainders (Hamilton's method), and each remainder is carried to the next round,
    so that the total after T rounds stays near T q_c. Without the carry a stratum with q_c < 1/2 would never
    be seen.

    `taken(t)` is O(t x strata) in time and memory, once, when some q_c is not whole, O(strata) when all are.
    """

    def __init__(self, sizes: Sequence[int], size: int) -> None:
        """sizes: entries of each stratum; size: entries of a round, k <= sum(sizes)."""
        total = sum(sizes)
        exact = [size * stratum for stratum in sizes]
        self.least = np.asarray([product // total for product in exact], np.int64)
        self._remainder = np.asarray([product % total for product in exact], np.int64)
        self._total = total
        self._extra = size - int(self.least.sum())
        self._carried = np.zeros(len(sizes), np.int64)
        self._table = np.zeros((1, len(sizes)), np.int64)
        self._filled = 1

    @property
    def most(self) -> Ints:
        """The largest share that any round takes of each stratum, int64 (strata,)."""
        return self.least + (self._remainder > 0)

    def taken(self, t: int | Ints) -> Ints:
        """Entries of each stratum that the rounds before round t take together: int64 (strata,).

        t: one round for all strata, or int64 (strata,).
        """
        if self._extra == 0:
            return np.asarray(t * self.least)
        self._extend(int(np.max(t)))
        return np.asarray(t * self.least + self._table[t, np.arange(len(self.least))])

    def first_reaching(self, taken: Ints) -> Ints:
        """The smallest t with self.taken(t) >= taken, for each stratum: int64 (strata,); 0 where nothing is
        ever taken.
        """
        mean = self._remainder / self._total + self.least
        guess = np.where(mean > 0, np.ceil(taken / np.where(mean > 0, mean, 1)), 0).astype(np.int64)
        while (behind := (mean > 0) & (self.taken(guess) < taken)).any():
            guess += behind
        while (ahead := (guess > 0) & (self.taken(np.maximum(guess - 1, 0)) >= taken)).any():
            guess -= ahead
        return guess

    def _extend(self, t: int) -> None:
        if t >= len(self._table):
            grown = np.zeros((max(t + 1, 2 * len(self._table)), self._table.shape[1]), np.int64)
            grown[: self._filled] = self._table[: self._filled]
            self._table = grown
        never = self._remainder == 0
        for row in range(self._filled, t + 1):
            self._carried += self._remainder
            order = np.lexsort((np.arange(len(never)), -self._carried, never))
            winners = order[: self._extra]
            self._carried[winners] -= self._total
            self._table[row] = self._table[row - 1]
            self._table[row, winners] += 1
        self._filled = max(self._filled, t + 1)
