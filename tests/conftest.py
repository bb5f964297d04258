"""Fixtures that cost seconds, shared by all tests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def tiny_scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised model `small`, as a folder that `scorer.weights` loads."""
    return save_scorer(tmp_path_factory.mktemp("scorer"), seed=0)


def save_scorer(folder: Path, seed: int) -> Path:
    import torch
    from safetensors.torch import save_file

    from pipeline.scorer import load_open_clip

    torch.manual_seed(seed)
    model, architecture, _ = load_open_clip("small", None)
    config = {"model_cfg": architecture, "preprocess_cfg": model.visual.preprocess_cfg}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers as objects of this process: for tests of what is scanned, where Ray itself is not the matter."""
    run_in_process(monkeypatch)


def run_in_process(patch: pytest.MonkeyPatch) -> None:
    """What the fixture `in_process` does, for fixtures of a wider scope."""
    from pipeline import cluster

    def run(_workers: Any, actor: Any, args: Any, method: str, tasks: Any) -> Iterator[tuple[Any, Any]]:
        worker = actor(*args)
        for task in tasks:
            yield task, getattr(worker, method)(task)

    @contextlib.contextmanager
    def stay(workers: Any, actor: Any, args: Any) -> Iterator[Any]:
        worker = actor(*args)

        class Here:
            def map(self, method: str, tasks: Any) -> Iterator[tuple[Any, Any]]:
                return ((task, getattr(worker, method)(task)) for task in tasks)

        yield Here()

    patch.setattr(cluster, "connect", lambda: None)
    patch.setattr(cluster, "plan_workers", lambda _config, _units: cluster.Workers(1, 1, 0.0))
    patch.setattr(cluster, "largest_node", lambda _resource: 1.0)
    patch.setattr(cluster, "worker_device", lambda: "cpu")
    patch.setattr(cluster, "map_actors", run)
    patch.setattr(cluster, "actors", stay)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray of two workers for the whole session."""
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={
            "worker_process_setup_hook": "tests.far.register",
            "env_vars": {"PYTHONPATH": str(Path(__file__).parent.parent)},
        },
    )  # fmt: skip
    yield
    ray.shutdown()
