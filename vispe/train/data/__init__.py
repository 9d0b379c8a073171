"""Training data: image sources, and reproducible batches that depend on the seed and the step only.

>>> source = from_config([{"synthetic": 100, "side": 64}])
>>> first = next(Batches(source, img_size=64, batch_size=2, seed=0).from_step(0))

`from_config` builds the sources of a recipe; `Batches` returns batches of any `Source` by step; `segments` extracts
windows of large images as one sequence.
"""

from vispe.train.data.augmentation import Augment
from vispe.train.data.dataloader import Batches
from vispe.train.data.dataset import ConcatSource, Mixture, Source
from vispe.train.data.hub_dataset import HubSource
from vispe.train.data.image_folder import FolderSource
from vispe.train.data.source_config import from_config
from vispe.train.data.synthetic import SyntheticSource
from vispe.train.data.tar_dataset import TarSource
from vispe.train.data.window_sequences import segments

__all__ = [
    "Augment",
    "Batches",
    "ConcatSource",
    "FolderSource",
    "HubSource",
    "Mixture",
    "Source",
    "SyntheticSource",
    "TarSource",
    "from_config",
    "segments",
]
