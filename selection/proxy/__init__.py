"""Training a small network on labelled images: the judge of what a selection is worth.

    images = load_images("/data/pool/*.tar", LabelConfig(field="label"))       # or a parquet table, or a folder
    test = load_images("/data/test.parquet", known=images.classes)
    config = ProxyConfig(arch="resnet9", width=16, batch_size=128)
    order = batches(epochs(np.arange(len(images)), seed=0), config.batch_size)
    trained = train_proxy(images, order, steps=1000, seed=0, config=config, test=test, evaluations=5)
    trained.points[-1].accuracy, trained.seconds, trained.unique
    accuracy(trained.model, test)

`LabelledImages` holds uint8 pixels and int64 labels, in memory or memory-mapped; `take(rows)` makes a part of
it, `of_run` takes a run's manifest. `epochs` (shuffled passes) and `rounds_order` (RS2) give the order as
arrays of row numbers, `batches` cuts any such stream into batches of one size. `train_proxy` depends on its
arguments and the seed alone (to the bit on a CPU). `build_net` gives the bare networks: `resnet9` and the
`convnet` of dataset condensation.
"""

from selection.proxy.clock import Point
from selection.proxy.images import LabelConfig, LabelledImages, load_images, of_run
from selection.proxy.nets import build_net
from selection.proxy.order import batches, epochs, rounds_order
from selection.proxy.train import Proxy, ProxyConfig, Trained, accuracy, augment, train_proxy

__all__ = [
    "LabelConfig",
    "LabelledImages",
    "Point",
    "Proxy",
    "ProxyConfig",
    "Trained",
    "accuracy",
    "augment",
    "batches",
    "build_net",
    "epochs",
    "load_images",
    "of_run",
    "rounds_order",
    "train_proxy",
]
