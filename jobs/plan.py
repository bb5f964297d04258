"""Before a run: check its whole configuration at once, read one shard, and say what the pool will take.

python -m jobs.plan pool.shards='/data/pool/*.tar' out=/data/winnow scorer.weights=/data/filter

Takes every key of jobs.curate, and writes nothing to `out`.
"""

from __future__ import annotations

import os
import shutil
import time

from omegaconf import DictConfig

from jobs.curate import FILLED, CurateConfig
from jobs.launch import launch, register
from jobs.plan_checks import Plan, existing, out_folder
from jobs.plan_costs import basis_of, stage_costs
from jobs.stages import filter_stage
from pipeline import cluster, storage
from pipeline.cluster import Workers
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.estimate import (
    Cost,
    PoolSize,
    chain_costs,
    driver_bytes,
    duration,
    human,
    pool_size,
    process_age,
    scan_cost,
)
from pipeline.probe import Probe, ProbeTask, ProbeWorker
from pipeline.scan import Survey, divide


def run(config: DictConfig) -> None:
    age = process_age()
    started = time.monotonic()
    if config.pool.metadata:
        raise Refused(
            "pool.metadata: a plan reads a shard, and such a pool has none; docs/scale.md has its costs"
        )
    plan = Plan(config)
    plan.check()
    here = plan.survey()
    plan.problems.stop()
    assert here is not None
    cluster.connect()
    _done, tasks = divide(here.tables, here.found)
    todo = [t.shard for t in tasks]
    probed = (todo or here.found)[0]
    workers = cluster.plan_workers(plan.parts["cluster"], max(len(todo), 1))
    begun = time.monotonic()
    probes = probe(here, workers, plan.parts["decode"], probed)
    waited = time.monotonic() - begun - max(p.seconds for p in probes)
    first = probes[0]
    plan.problems.lines += [
        f"scorer.batch_size={here.identity['batch_size']}: {p.refused}" for p in probes if p.refused
    ]
    plan.problems.lines += _gpu(workers, first, here.identity["batch_size"])
    if first.report is not None and not first.report.status.get("ok"):
        plan.problems.lines.append(f"{probed}: none of its first {first.samples} samples can be read")
    plan.problems.stop()
    size = pool_size(here, todo, first, probed)
    chain = plan.problems.tried(lambda: chain_costs(here, first, [filter_stage(config)], size))
    plan.problems.stop()
    assert chain is not None
    basis = basis_of(size, probes, workers.count, workers.cpus, _width(here), chain[1])
    startup = age + (begun - started) + _start_of(waited, first)
    costs = [Cost("start", startup, human(driver_bytes(size.shards)), note="imports, Ray, loading the model")]
    costs.append(scan_cost(size, workers, probes, _width(here)))
    costs += [*chain[0][:-1], *stage_costs(plan.parts, basis), chain[0][-1]]
    _fits(plan, costs, workers, first)
    report(size, workers, first, probed, costs)
    plan.problems.stop()


def probe(here: Survey, workers: Workers, decode: DecodeConfig, shard: str) -> list[Probe]:
    """One probe of the same shard on every worker that one machine runs, all at a time as in the run."""
    count = min(workers.count, max(1, int(cluster.largest_node("CPU") // workers.cpus)))
    if workers.gpus:
        count = min(count, max(1, int(cluster.largest_node("GPU") / workers.gpus)))
    args = [here.worker_setup("", decode), workers.cpus]
    tasks = [ProbeTask(shard, n) for n in range(count)]
    some = Workers(count, workers.cpus, workers.gpus)
    return [result for _, result in cluster.map_actors(some, ProbeWorker, args, "probe", tasks)]


def _start_of(waited: float, probe: Probe) -> float:
    """What workers take to come up: the wait, less the warm-up, which the run spends scanning."""
    pace = probe.samples / max(probe.seconds, 1e-6)
    return max(probe.load_seconds, waited - 64 / pace)


def _width(here: Survey) -> int:
    scorer = here.identity["scorer"]
    return int(scorer["architecture"]["embed_dim"]) if scorer else 0


def _gpu(workers: Workers, probe: Probe, batch: int) -> list[str]:
    """Workers that share a GPU must fit on it together."""
    sharing = int(1 / workers.gpus) if 0 < workers.gpus < 1 else 1
    need = probe.gpu_peak * sharing
    if not probe.gpu_total or need <= probe.gpu_total:
        return []
    return [
        f"scorer.batch_size={batch}: {sharing} workers a GPU need {human(need)}, it has {human(probe.gpu_total)};"
        f" try {max(1, int(batch * probe.gpu_total / need / 1.2))}, or a larger cluster.gpus_per_worker"
    ]


def _fits(plan: Plan, costs: list[Cost], workers: Workers, probe: Probe) -> None:
    """Disk and memory against what there is, as far as this machine can tell."""
    need, out = sum(c.disk for c in costs), out_folder(plan.config)
    if storage.is_local(out):
        free = shutil.disk_usage(existing(out)).free
        if need > free:
            plan.problems.lines.append(f"out={out}: needs {human(need)}, {human(free)} are free there")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = min(workers.count, max(1, int(cluster.largest_node("CPU") // workers.cpus)))
    if probe.peak * here > memory:
        plan.problems.lines.append(
            f"cluster.workers={here} on one machine need {human(probe.peak * here)} of memory, it has {human(memory)}"
        )


def report(size: PoolSize, workers: Workers, first: Probe, probed: str, costs: list[Cost]) -> None:
    """The estimate, as a person reads it."""
    print(f"pool     {size.shards:,} shards, {size.samples:,} samples by {size.told_by}, {human(size.bytes)}")
    if size.todo_shards < size.shards:
        print(f"         {size.shards - size.todo_shards:,} of the shards have tables already")
    lost = 1 - (first.report.status.get("ok", 0) / max(first.samples, 1) if first.report else 0)
    model = f", model {first.scored:,.0f}/s on one thread" if first.scored else ""
    print(
        f"probe    {first.samples:,} samples of {probed} in {first.seconds:.1f} s"
        f" (decode {first.decoded:,.0f}/s on one thread{model}); {lost:.1%} cannot be read"
    )
    if first.gpu_total:
        print(f"         {human(first.gpu_peak)} of the GPU's {human(first.gpu_total)} a worker")
    print(f"workers  {workers.count}, each {workers.cpus} CPUs and {workers.gpus:g} GPUs\n")
    print(f"{'':9}{'time':>8}  {'disk':>9}  memory")
    for c in costs:
        note = f"  ({c.note})" if c.note else ""
        print(f"{c.name:9}{duration(c.seconds):>8}  {human(c.disk) if c.disk else '':>9}  {c.memory}{note}")
    seconds, gpu = sum(c.seconds for c in costs), sum(c.gpu_seconds for c in costs)
    print(
        f"{'total':9}{duration(seconds):>8}  {human(sum(c.disk for c in costs)):>9}  {gpu / 3600:.1f} GPU-hours"
    )


register("plan", CurateConfig, FILLED)

if __name__ == "__main__":
    launch("plan", run)
