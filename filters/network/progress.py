"""Progress of a loop of known length: a live bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

LINE_SECONDS = 15.0


class Progress:
    """Counts `total` steps of which `done` were taken before. Writes to standard error."""

    def __init__(self, total: int, done: int, what: str) -> None:
        self.what, self.total, self.done = what, total, done
        self._first, self._began, self._told = done, time.monotonic(), time.monotonic()
        self._bar = tqdm(total=total, initial=done, desc=what, disable=not sys.stderr.isatty())

    def step(self, note: str) -> None:
        self.done += 1
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and (now - self._told > LINE_SECONDS or self.done == self.total):
            self._told = now
            left = (now - self._began) / (self.done - self._first) * (self.total - self.done)
            print(
                f"{self.what}: {self.done}/{self.total}, {note}, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        self._bar.close()
