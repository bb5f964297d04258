"""RS2: every round trains on a fresh random share of the pool (Okanovic et al., ICLR 2024, section 3).

Round t is a pure function of (seed, t). It is never stored and no permutation of the pool is ever held: how
many entries of each shard it takes comes from a tree of hypergeometric draws (`selection.tree`), which ones
they are from a permutation of that shard alone. Any shard of any round can be asked for first, by any
process.

An *entry* is what is drawn: a manifest row with `copies` = c is c entries. Entries are alike, so two copies
of a sample may meet in one round, as two different samples may; over a pass each copy is used once.

With replacement, the rounds are independent: each is a uniform subset of k distinct entries; "replacement" is
between rounds, not within one.

Without replacement, the rounds cut an endless stream of *passes*, each a permutation of the pool, into pieces
of k. Write N for the entries, and for pass p write

    pass p = H_p  R_1 ... R_n  A_p      head of h_p, whole rounds, tail of a_p entries,

where the round that straddles passes p-1 and p is A_{p-1} + H_p. The sets are drawn in this order:

1.  A fixed uniform half U of the pool; A_p is a uniform subset of U for even p, of its complement for odd p,
    each p on its own. It fits, for a_p <= k-1 <= (N-1)/2.
2.  H_p is a uniform subset of what is outside A_{p-1} and A_p, which are disjoint by 1. It fits, for
    (a_{p-1} + h_p) + a_p <= k + (k-1) <= N.
3.  R_1 ... R_n are a uniform division of the rest.

Hence, whatever the draws: every pass is a partition of the pool, so each entry is used exactly once in it,
entries that a head had to skip included (they are in R_1 ... R_n or A_p); a straddling round has no entry
twice, for H_p avoids A_{p-1}; and after any number of rounds the use counts of any two entries differ by at
most 1, for all whole passes used each entry once and the begun one at most once. The rules name no entry, so
all N! relabellings of the pool are equally likely: each round by itself is a uniform k-subset. And they go
back no further than pass p-1, so a round costs the same at t = 0 and t = 10^6. This is the reference's "take
the next ones, skip those already held" except in where a skipped entry goes: it is spread over the rest of
its pass rather than served in the very next round, and tails of neighbouring passes never meet.

The bounds in 1 and 2 need k <= (N+1)/2. For r > 1/2 the rounds are the complements of rounds of N - k
entries: an entry is left out equally often, give or take one, hence used equally often, give or take one.

Stratified, all of this holds in each stratum by itself, with the sizes of `selection.quotas`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import numpy.typing as npt

from selection.draws import Ints, Key, derive, seed_key, shuffled
from selection.manifest_rows import UID, Manifest, ShardMembers
from selection.quotas import Quotas, round_size
from selection.tree import Counts, ShardTree, Subset

_STRATUM, _PICK, _HALF, _TAIL, _HEAD, _SLICE, _MIDDLE = range(1, 8)
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How one round is drawn. Arrays have one element a stratum.

    period: the pass (the round itself with replacement); straddles: whether the round is A_{p-1} + H_p;
    idle: whether no round draws anything, from an empty stratum or when every round is the whole pool;
    lefts: for each halving of the whole rounds of the pass, whether round t is in the left half;
    known: upper nodes of the shard tree already counted for this round.
    """

    period: Ints
    straddles: Mask
    idle: Mask
    lefts: Sequence[Mask]
    subsets: Sequence[Subset]
    known: dict[int, Counts] = field(default_factory=dict)


def _other_half(takes_half: Mask, counts: Counts) -> Ints:
    return np.where(takes_half, counts["half"], counts["all"] - counts["half"])


def _outside(names: Sequence[str], counts: Counts) -> Ints:
    return counts["all"] - sum(counts[name] for name in names if name in counts)


def _interval(lefts: Sequence[Mask], counts: Counts) -> Ints:
    """Entries in the whole rounds of the pass, after following `lefts`."""
    inside = _outside(("head", "own_tail"), counts)
    for depth, left in enumerate(lefts):
        part = counts[f"slice{depth}"]
        inside = np.where(left, part, inside - part)
    return inside


class Rounds:
    """RS2 rounds over a pool of entries described by their number in each shard.

    counts: int64 (S,), entries of each shard; ratio: r, exact as the decimal it is written as; seed: 0 ..
    2^64-1; replacement: whether rounds are independent of each other (see the module); strata: int64 (S, C),
    entries of each stratum in each shard, summing to counts, or None; manifest: needed by `uids`, `shards`
    and `shard`, and by `members` when stratified.

    Every round has exactly k = round(r N) distinct entries, half up. Raises ValueError for counts, strata,
    ratio or seed that do not fit. Memory is O(S C), plus O(t C) when stratified (`Quotas`).
    """

    def __init__(
        self,
        counts: npt.ArrayLike,
        ratio: str | float | Decimal | Fraction,
        seed: int,
        *,
        replacement: bool = False,
        strata: npt.ArrayLike | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.counts = np.asarray(counts, np.int64)
        table = self.counts[:, None] if strata is None else np.asarray(strata, np.int64)
        if (
            self.counts.ndim != 1
            or len(self.counts) == 0
            or table.min(initial=0) < 0
            or self.counts.sum() < 1
        ):
            raise ValueError(f"counts={counts!r}: one number >= 0 for each shard, not all 0")
        if table.ndim != 2 or not np.array_equal(table.sum(axis=1), self.counts):
            raise ValueError("strata: shape (shards, strata), each row summing to the shard's count")
        self.strata = None if strata is None else table
        self.manifest = manifest
        self.seed, self.replacement = seed, replacement
        self.entries = int(self.counts.sum())
        self.ratio, self.k = round_size(self.entries, ratio)
        self._sizes = table.sum(axis=0)
        # Of more than half the pool, draw what is left out.
        self._inverted = not replacement and 2 * self.k > self.entries
        self._quotas = Quotas(self._sizes.tolist(), self.entries - self.k if self._inverted else self.k)
        self._tree = ShardTree(table)
        self._keys = derive(seed_key(seed), _STRATUM, np.arange(table.shape[1]))
        self._planned: tuple[int, _Plan] | None = None

    def size(self, t: int) -> int:
        """Entries of round t: k, for every t."""
        _check_round(t)
        return self.k

    def steps(self, t: int, batch_size: int) -> int:
        """Optimiser steps of round t at a *global* batch of batch_size: all entries, the last batch may be
        smaller.
        """
        return -(-self.size(t) // batch_size)

    def stratum_sizes(self, t: int) -> Ints:
        """Entries that round t takes of each stratum, int64 (C,), summing to k; C = 1 when not stratified."""
        _check_round(t)
        drawn = self._quotas.taken(t + 1) - self._quotas.taken(t)
        return self._sizes - drawn if self._inverted else drawn

    def shard_sizes(self, t: int) -> Ints:
        """Entries that round t takes of each shard, int64 (S,), summing to k. One pass over all shards."""
        plan = self._plan(t)
        return self._taken(plan, self._tree.leaves(plan.subsets)).sum(axis=1)

    def members(self, t: int, shard: int) -> Ints:
        """Entry numbers within the shard that round t takes: int64, sorted, distinct, each below
        counts[shard].

        Touches nothing but this shard: O(log S log 1/r) draws and a sort of the shard's entries.
        """
        plan = self._plan(t)
        return self._members(plan, self._tree.leaf(plan.subsets, shard, plan.known), shard)

    def all_members(self, t: int) -> Iterator[tuple[int, Ints]]:
        """(shard, members(t, shard)) for the shards with members, in order; quicker than one by one."""
        plan = self._plan(t)
        leaves = self._tree.leaves(plan.subsets)
        for shard in np.flatnonzero(self._taken(plan, leaves).sum(axis=1)).tolist():
            row = {name: array[shard : shard + 1] for name, array in leaves.items()}
            yield shard, self._members(plan, row, shard)

    def shards(self, t: int) -> Iterator[ShardMembers]:
        """What round t reads of each shard that it takes entries of: rows, uids and byte ranges."""
        for shard, positions in self.all_members(t):
            yield self._with_rows(shard, positions)

    def shard(self, t: int, shard: int) -> ShardMembers:
        """What round t reads of one shard."""
        return self._with_rows(shard, self.members(t, shard))

    def _with_rows(self, shard: int, positions: Ints) -> ShardMembers:
        manifest = self._required_manifest()
        rows = manifest.rows(shard)
        entry_rows = rows.rows_of_entries()
        if len(entry_rows) != self.counts[shard]:
            raise ValueError(
                f"{manifest.shards[shard]}: the manifest has {len(entry_rows)} entries, the counts say "
                f"{self.counts[shard]}; make the rounds anew from this manifest"
            )
        return ShardMembers(
            index=shard,
            path=manifest.shards[shard],
            positions=positions,
            rows=rows.take(entry_rows[positions]),
        )

    def uids(self, t: int) -> npt.NDArray[np.void]:
        """uids of round t, `u8,u8` (k,), sorted lexicographically; a uid repeats when several of its copies
        are taken.

        Holds the round, 16 bytes an entry, and as much again to sort; `selection.round_files` writes larger
        ones.
        """
        uids = np.concatenate([members.rows.uids for members in self.shards(t)] or [np.empty(0, UID)])
        return uids[np.lexsort((uids["f1"], uids["f0"]))]

    def unique_seen(self, rounds: int) -> int:
        """Distinct entries in rounds 0 .. rounds-1 together.

        From the use counts alone without replacement; with it, by making every round, shard by shard.
        """
        if rounds < 1:
            return 0
        if not self.replacement:
            drawn = self._quotas.taken(rounds)
            used = rounds * self._sizes - drawn if self._inverted else drawn
            return int(np.minimum(used, self._sizes).sum())
        seen = 0
        for shard in range(len(self.counts)):
            mark = np.zeros(self.counts[shard], bool)
            for t in range(rounds):
                mark[self.members(t, shard)] = True
            seen += int(mark.sum())
        return seen

    def _required_manifest(self) -> Manifest:
        if self.manifest is None:
            raise ValueError("manifest=None: give Rounds the manifest that its counts were taken from")
        return self.manifest

    def _plan(self, t: int) -> _Plan:
        _check_round(t)
        if self._planned is None or self._planned[0] != t:
            self._planned = t, self._plan_independent(t) if self.replacement else self._plan_pass(t)
        return self._planned[1]

    def _key(self, purpose: int, first: npt.ArrayLike = 0, second: npt.ArrayLike = 0) -> Key:
        return derive(self._keys, purpose, first, second)

    def _plan_independent(self, t: int) -> _Plan:
        period = np.full(len(self._sizes), t)
        pick = Subset(
            name="pick",
            key=self._key(_PICK, period),
            total=self.stratum_sizes(t),
            universe=partial(_outside, ()),
        )
        nowhere = np.zeros(len(period), bool)
        return _Plan(period=period, straddles=nowhere, idle=nowhere, lefts=(), subsets=[pick])

    def _plan_pass(self, t: int) -> _Plan:
        """Lay round t out on its pass: the sizes of head, tails and whole rounds, and the halvings that lead
        to t.
        """
        sizes, taken = self._sizes, self._quotas.taken
        start, stop = taken(t), taken(t + 1)
        p = np.maximum(start, stop - 1) // np.maximum(sizes, 1)
        first = self._quotas.first_reaching(p * sizes)
        head = taken(first) - p * sizes
        last_tail = np.where(head > 0, p * sizes - taken(np.maximum(first - 1, 0)), 0)
        idle = self._quotas.most == 0
        end = np.where(idle, t + 1, self._quotas.first_reaching((p + 1) * sizes + 1) - 1)
        own_tail = np.where(idle, 0, (p + 1) * sizes - taken(end))
        straddles = start < p * sizes

        even = p % 2 == 0
        tails = [
            Subset(name="half", key=self._key(_HALF), total=sizes // 2, universe=partial(_outside, ())),
            Subset(
                name="last_tail",
                key=self._key(_TAIL, np.maximum(p - 1, 0)),
                total=last_tail,
                universe=partial(_other_half, ~even),
            ),
            Subset(
                name="own_tail", key=self._key(_TAIL, p), total=own_tail, universe=partial(_other_half, even)
            ),
            Subset(
                name="head",
                key=self._key(_HEAD, p),
                total=head,
                universe=partial(_outside, ("last_tail", "own_tail")),
            ),
        ]
        if not (last_tail.any() or own_tail.any()):
            tails = []
        alone = straddles | idle
        lefts, slices = self._plan_slices(
            t, p, np.where(alone, t, first), np.where(alone, t + 1, end), sizes - head - own_tail
        )
        return _Plan(period=p, straddles=straddles, idle=idle, lefts=lefts, subsets=tails + slices)

    def _plan_slices(
        self, t: int, p: Ints, low: Ints, high: Ints, inside: Ints
    ) -> tuple[list[Mask], list[Subset]]:
        """Halve the rounds [low, high) of each stratum's pass, `inside` entries in all, until round t is
        left.
        """
        lefts: list[Mask] = []
        slices: list[Subset] = []
        node = np.ones_like(p)
        while (high - low > 1).any():
            whole = high - low == 1
            middle = np.where(whole, high, (low + high) // 2)
            total = np.where(whole, inside, self._quotas.taken(middle) - self._quotas.taken(low))
            slices.append(
                Subset(
                    name=f"slice{len(slices)}",
                    key=self._key(_SLICE, p, node),
                    total=total,
                    universe=partial(_interval, tuple(lefts)),
                )
            )
            left = t < middle
            lefts.append(left)
            inside = np.where(left, total, inside - total)
            low, high = np.where(left, low, middle), np.where(left, middle, high)
            node = 2 * node + ~left
        return lefts, slices

    def _taken(self, plan: _Plan, counts: Counts) -> Ints:
        """Entries that the round takes at some nodes, int64 (nodes, C)."""
        if self.replacement:
            return counts["pick"]
        drawn = np.where(plan.idle, 0, _interval(plan.lefts, counts))
        if plan.straddles.any():
            drawn = np.where(plan.straddles, counts["last_tail"] + counts["head"], drawn)
        return counts["all"] - drawn if self._inverted else drawn

    def _members(self, plan: _Plan, counts: Counts, shard: int) -> Ints:
        """The entries behind the counts of one shard."""
        order, stratum = self._by_stratum(counts["all"][0], shard)
        in_shard = _ShardDraw(self, shard, stratum)
        drawn = (in_shard.independent if self.replacement else in_shard.of_pass)(plan, counts)
        return np.sort(order[drawn != self._inverted])

    def _by_stratum(self, sizes: Ints, shard: int) -> tuple[Ints, Ints]:
        """(entry numbers of the shard ordered by stratum, the stratum of each)."""
        if self.strata is None:
            return np.arange(sizes[0]), np.zeros(sizes[0], np.int64)
        rows = self._required_manifest().rows(shard)
        if rows.stratum is None:
            raise ValueError(f"shard {shard}: the rounds are stratified, the manifest's rows have no stratum")
        stratum = np.repeat(rows.stratum, rows.copies)
        if not np.array_equal(np.bincount(stratum, minlength=len(sizes)), sizes):
            raise ValueError(
                f"{self._required_manifest().shards[shard]}: strata differ from the counts; make new rounds"
            )
        order = np.argsort(stratum, kind="stable")
        return order, stratum[order]


class _ShardDraw:
    """Which entries of one shard are in which set, given how many are. stratum: of each entry, ascending."""

    def __init__(self, rounds: Rounds, shard: int, stratum: Ints) -> None:
        self._rounds, self._shard, self._stratum = rounds, shard, stratum

    def independent(self, plan: _Plan, counts: Counts) -> Mask:
        return self._choose(np.ones(len(self._stratum), bool), _PICK, plan.period, 0, counts["pick"][0])

    def of_pass(self, plan: _Plan, counts: Counts) -> Mask:
        everything = np.ones(len(self._stratum), bool)
        tail = head = own_tail = ~everything
        if "half" in counts:
            half = self._choose(everything, _HALF, 0, 0, counts["half"][0])
            even = (plan.period % 2 == 0)[self._stratum]
            last = np.maximum(plan.period - 1, 0)
            tail = self._choose(half != even, _TAIL, last, 0, counts["last_tail"][0])
            own_tail = self._choose(half == even, _TAIL, plan.period, 0, counts["own_tail"][0])
            head = self._choose(~(tail | own_tail), _HEAD, plan.period, 0, counts["head"][0])
        if plan.straddles.all():
            return tail | head
        before = np.zeros(len(plan.period), np.int64)
        for depth, left in enumerate(plan.lefts):
            before += np.where(left, 0, counts[f"slice{depth}"][0])
        stop = np.where(plan.idle, before, before + _interval(plan.lefts, counts)[0])
        middle = self._choose(~(head | own_tail), _MIDDLE, plan.period, before, stop)
        return np.where(plan.straddles[self._stratum], tail | head, middle)

    def _choose(
        self, universe: Mask, purpose: int, period: int | Ints, start: int | Ints, stop: Ints
    ) -> Mask:
        """Places start .. stop-1 of a random order of the entries in `universe`, in each stratum."""
        entries = np.flatnonzero(universe)
        stratum = self._stratum[entries]
        sizes = np.bincount(stratum, minlength=len(stop))
        first = np.cumsum(sizes) - sizes
        order = shuffled(self._rounds._key(purpose, period), self._shard, sizes) + first[stratum]
        place = np.arange(len(entries)) - first[stratum]
        starts = np.broadcast_to(start, len(stop))
        chosen = np.zeros(len(universe), bool)
        chosen[entries[order[(place >= starts[stratum]) & (place < stop[stratum])]]] = True
        return chosen


def _check_round(t: int) -> None:
    if not 0 <= t < 1 << 32:
        raise ValueError(f"t={t}: rounds are numbered from 0 to 2^32 - 1")
