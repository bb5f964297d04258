"""A filesystem that is not the local one: `far://tmp/x` is the local path /tmp/x reached through fsspec's remote calls."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class FarFileSystem(DirFileSystem):
    protocol = "far"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        return path.removeprefix("far://").strip("/")

    def _join(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._join(p) for p in path]
        return "/" + self._strip_protocol(path)

    def _relpath(self, path: Any) -> Any:
        return [self._relpath(p) for p in path] if isinstance(path, list) else path.strip("/")


def register() -> None:
    fsspec.register_implementation("far", FarFileSystem, clobber=True)
