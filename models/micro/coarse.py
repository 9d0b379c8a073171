"""Second teacher of vispe_micro: features of a large vision transformer, distilled into the trunk."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.micro.model import PATCH, Micro
from vispe.backbones.vision_model import VisionModel
from vispe.train.retrofit.student import load_student


class Coarse(nn.Module):
    """Distil the features of a retrofitted model into the trunk of a network with the same token grid.

    A linear head, which is discarded after training, maps the tokens of the trunk to the features. The loss is one
    minus the cosine similarity after subtraction of the channel means over the batch, which removes the component
    common to all patches.

    Args:
        folder: output folder of `vispe retrofit`.
        block: zero-based index of the block of that model whose output is the target.
        model: network to train. A forward hook is registered on its trunk.

    Example:
        ``Coarse(Path("runs/alibi2d"), 7, Micro())``
    """

    def __init__(self, folder: Path, block: int, model: Micro) -> None:
        super().__init__()
        student, _, _ = load_student(folder)
        self._target = [  # in a list, so that it is not registered as a submodule
            VisionModel(student.model, layer=block, mean=student.mean, std=student.std, exact=False)
        ]
        self._outputs: list[Tensor] = []
        width = model.trunk.norm.normalized_shape[0]
        self.head = nn.Linear(width, self._target[0].channels)
        model.trunk.register_forward_hook(lambda *call: self._outputs.append(call[-1]))

    def target(self, images: Tensor) -> Tensor:
        """Return the features (b, c, h / 16, w / 16) of images (b, 3 or 1, h, w) in [0, 1]."""
        model = self._target[0]
        rows, columns = (side // PATCH * model.patch_size for side in images.shape[-2:])
        scaled = F.interpolate(images, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
        scaled = scaled.clamp(0, 1).expand(-1, 3, -1, -1)
        with torch.no_grad():
            return model((scaled - model.mean) / model.std)

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss () of the last forward pass of the trunk, for its input images."""
        tokens = self._outputs[-1]
        self._outputs.clear()
        target = self.target(images).flatten(2)
        prediction = self.head(tokens.flatten(2).mT).mT
        prediction, target = (f - f.mean((0, 2), keepdim=True) for f in (prediction, target))
        return 1 - F.cosine_similarity(prediction, target, dim=1).mean()
