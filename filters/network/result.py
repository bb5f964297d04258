"""The result folder: open_clip's own layout, and beside it how the network came about.

    open_clip_config.json, open_clip_model.safetensors   open_clip.create_model("local-dir:DIR") loads these
    train.json                                           settings, counts, held-out figures, versions
    curve.csv, curve.png                                 loss, rate and held-out AUC by step

`train.json` is written last: a folder that has it is complete.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME
from open_clip.tokenizer import HFTokenizer
from safetensors.torch import save_file

from filters.network.evaluate import HeldOut
from pipeline import storage

SUMMARY = "train.json"
WEIGHTS = HF_SAFE_WEIGHTS_NAME


@dataclass(frozen=True)
class CurvePoint:
    """loss: mean over the steps since the point before. held_out_auc: None where it was not measured."""

    step: int
    samples_seen: int
    learning_rate: float
    loss: float
    logit_scale: float
    held_out_auc: float | None


@dataclass(frozen=True)
class TrainResult:
    """What `train.json` holds.

    request: all settings that decide the weights. pairs: counts, see `TrustedPairs.report`. seconds: time
    trained, over all restarts. loss: that of the last curve point. weights_of_step: the step whose weights
    these are, the best on the held-out pairs. held_out: their figures there (a little flattered by that
    choice), or None.
    """

    request: dict[str, Any]
    pairs: dict[str, Any]
    steps: int
    samples_seen: int
    parameters: int
    device: str
    precision: str
    seconds: float
    loss: float
    weights_of_step: int
    held_out: HeldOut | None
    versions: dict[str, str]
    workers: int = 1

    def describe(self) -> str:
        """One line for a person."""
        distinct = self.pairs["trained_on"]
        parts = [f"{self.samples_seen} pairs seen in {self.seconds:.0f} s, {distinct} of them distinct"]
        if rejected := sum(self.pairs["rejected"].values()):
            parts.append(f"{rejected} rejected")
        parts.append(f"loss {self.loss:.3f}")
        if self.held_out and self.held_out.auc is not None:
            parts.append(f"AUC {self.held_out.auc:.3f} on {self.held_out.pairs} held-out pairs")
        return ", ".join(parts)


def write_model(out: str, model: Any, architecture: dict[str, Any], tokenizer: Any) -> None:
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
    with storage.commit(storage.join(out, WEIGHTS)) as tmp:
        save_file(tensors, tmp)
    preprocess = {
        k: v for k, v in model.visual.preprocess_cfg.items() if k != "size"
    }  # model_cfg has the size
    storage.write_json(
        storage.join(out, HF_CONFIG_NAME), {"model_cfg": architecture, "preprocess_cfg": preprocess}
    )
    if isinstance(tokenizer, HFTokenizer):  # open_clip looks for its files beside the config
        with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
            tokenizer.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                storage.copy(str(path), storage.join(out, path.name))


def write_curve(out: str, curve: list[CurvePoint]) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, [f.name for f in fields(CurvePoint)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(p) for p in curve)
    storage.write_bytes(storage.join(out, "curve.csv"), text.getvalue().encode())
    image = io.BytesIO()
    _plot(curve).savefig(image, format="png", dpi=120)
    storage.write_bytes(storage.join(out, "curve.png"), image.getvalue())


def _plot(curve: list[CurvePoint]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([p.samples_seen for p in curve], [p.loss for p in curve], color="tab:blue")
    axes.set(xlabel="pairs seen", ylabel="contrastive loss")
    measured = [(p.samples_seen, p.held_out_auc) for p in curve if p.held_out_auc is not None]
    if measured:
        right = axes.twinx()
        right.plot(*zip(*measured), "o-", color="tab:orange")
        right.set(ylabel="AUC on held-out pairs (orange)", ylim=(0.45, 1.005))
    return figure


def write_summary(out: str, result: TrainResult) -> None:
    storage.write_json(storage.join(out, SUMMARY), asdict(result))


def read_summary(out: str) -> TrainResult | None:
    """The result in the folder `out`, or None when it holds no complete one."""
    path = storage.join(out, SUMMARY)
    if not storage.exists(path):
        return None
    value = json.loads(storage.read_bytes(path))
    value["held_out"] = HeldOut(**value["held_out"]) if value["held_out"] else None
    return TrainResult(**value)
