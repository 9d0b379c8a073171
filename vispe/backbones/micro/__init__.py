"""vispe_micro, the small default backbone of `vispe segment`."""

from vispe.backbones.micro.load import WEIGHTS, features, load_micro, patch_features, patch_means
from vispe.backbones.micro.model import PATCH, STRIDE, Micro

__all__ = ["PATCH", "STRIDE", "WEIGHTS", "Micro", "features", "load_micro", "patch_features", "patch_means"]
