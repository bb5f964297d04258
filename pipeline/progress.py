"""Progress for whoever waits: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from tqdm import tqdm

LOG_EVERY_SECONDS = 15.0


class Progress:
    """Counts units of work (shards, steps) and the samples in them. Use as a context manager."""

    def __init__(self, title: str, total: int, unit: str = "shard", done: int = 0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self.samples, self.already = done, 0, done
        self.started = self.logged = time.monotonic()
        self.live = sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, desc=title, unit=unit, disable=not self.live)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.bar.close()
        if not self.live and self.done > self.already:
            self._line()

    def step(self, samples: int = 0, units: int = 1, note: str = "") -> None:
        self.done += units
        self.samples += samples
        rate = self.samples / max(time.monotonic() - self.started, 1e-9)
        self.bar.set_postfix_str(f"{rate:,.0f} samples/s {note}".strip() if samples else note, refresh=False)
        self.bar.update(units)
        if not self.live and time.monotonic() - self.logged > LOG_EVERY_SECONDS:
            self._line(note)

    def _line(self, note: str = "") -> None:
        self.logged = time.monotonic()
        elapsed = self.logged - self.started
        left = elapsed / max(self.done - self.already, 1) * (self.total - self.done)
        parts = [f"{self.title}: {self.done}/{self.total} {self.unit}s"]
        if self.samples:
            parts.append(f"{self.samples:,} samples, {self.samples / max(elapsed, 1e-9):,.0f}/s")
        if self.done < self.total:
            parts.append(f"{timedelta(seconds=round(left))} left")
        print("; ".join([*parts, note] if note else parts), file=sys.stderr, flush=True)
