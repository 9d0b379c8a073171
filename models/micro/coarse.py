"""A second teacher of vispe_micro: what a large vision transformer sees in 16 pixels, asked of the trunk."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.micro.model import PATCH, Micro
from vispe.backbones.vision_model import VisionModel
from vispe.train.retrofit.student import load_student


class Coarse(nn.Module):
    """Asks the trunk of a network for the features of a retrofitted model, one of whose tokens covers a token of it.

    A linear head, which is not kept, reads them off the trunk; the loss is one minus the cosine of features from whose
    channels the mean over the batch is taken, so that what all patches share teaches nothing.

    Args:
        folder: what `vispe retrofit` wrote.
        block: block of that model whose output is asked for, counted from 0.
        model: the network to train; its trunk is watched from now on.

    Example:
        ``Coarse(Path("runs/alibi2d"), 7, Micro())``
    """

    def __init__(self, folder: Path, block: int, model: Micro) -> None:
        super().__init__()
        student, _, _ = load_student(folder)
        # kept from the parameters and states of training
        self._target = [
            VisionModel(student.model, layer=block, mean=student.mean, std=student.std, exact=False)
        ]
        self._seen: list[Tensor] = []
        width = model.trunk.norm.normalized_shape[0]
        self.head = nn.Linear(width, self._target[0].channels)
        model.trunk.register_forward_hook(lambda *call: self._seen.append(call[-1]))

    def target(self, images: Tensor) -> Tensor:
        """Return the features (b, c, h / 16, w / 16) of images (b, 3 or 1, h, w) in [0, 1]."""
        model = self._target[0]
        rows, columns = (side // PATCH * model.patch for side in images.shape[-2:])
        scaled = F.interpolate(images, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
        scaled = scaled.clamp(0, 1).expand(-1, 3, -1, -1)
        with torch.no_grad():
            return model((scaled - model.mean) / model.std)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss () of what the trunk saw last, for the images that it saw."""
        tokens = self._seen[-1]
        self._seen.clear()
        wanted = self.target(images).flatten(2)
        found = self.head(tokens.flatten(2).mT).mT
        found, wanted = (f - f.mean((0, 2), keepdim=True) for f in (found, wanted))
        return 1 - F.cosine_similarity(found, wanted, dim=1).mean()
