import numpy as np
import pytest

from selection.influence import HeldOut, NpyShard, Rows, fit_head, influence, objective
from selection.influence.on_ray import ordered_map_on_ray


def test_shards_on_ray_give_the_bits_of_one_process(ray_cluster, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float16)
    y = (x[:, 0] + rng.logistic(size=300) > 0).astype(int)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(300), 5)):
        np.save(tmp_path / f"{number}.npy", x[part])
        shards.append(NpyShard(str(tmp_path / f"{number}.npy"), y[part]))
    deltas = []
    for rows in (Rows(shards), Rows(shards, ordered_map=ordered_map_on_ray(ahead=2))):
        head = fit_head(rows, l2=1, classes=2)
        term = objective("utility", HeldOut(x[:50].astype(float), y[:50]), head)
        deltas.append(influence(rows, head, [term]).delta_if_removed)
    assert (deltas[0] == deltas[1]).all()
    with pytest.raises(ValueError, match="ahead=0"):
        ordered_map_on_ray(0)
