"""The model of linear segmentation: batch norm, dropout and one 1x1 convolution on the patch features of a backbone."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vispe.backbones.model_access import final_tokens
from vispe.backbones.vision_model import VisionModel
from vispe.report.table import json_list
from vispe.segment.features.tiles import Blend, padding, tiles, window
from vispe.segment.metrics import confusion, ious, miou
from vispe.train.linear.dataset import Part


class LinearSegmenter(nn.Module):
    """Patch features -> scores of every pixel, by one linear map and bilinear interpolation.

    Args:
        backbone: where the features come from.
        n_classes: K.
        norm: batch norm before the linear map.
        dropout: share of features that are dropped in training.
        tune: train the backbone too; else it stays in evaluation mode and gets no gradients.
    """

    def __init__(
        self,
        backbone: VisionModel,
        n_classes: int,
        *,
        norm: bool = True,
        dropout: float = 0.1,
        tune: bool = False,
    ) -> None:
        super().__init__()
        self.tune = tune
        self.backbone = backbone.model.requires_grad_(tune)
        self.norm = nn.BatchNorm2d(backbone.channels) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Conv2d(backbone.channels, n_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def train(self, mode: bool = True) -> "LinearSegmenter":
        """Set the mode; a frozen backbone stays in evaluation mode."""
        super().train(mode)
        if not self.tune:
            self.backbone.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Images (b, 3, H, W), normalised -> scores (b, K, H, W)."""
        with torch.set_grad_enabled(self.tune and torch.is_grad_enabled()):
            maps, _ = final_tokens(self.backbone, images)
        scores = self.classifier(self.dropout(self.norm(maps.float())))
        return interpolate(scores, images.shape[-2:], mode="bilinear", align_corners=False)

    def own_state(self) -> dict[str, Tensor]:
        """Return the weights that were trained: all but those of a frozen backbone."""
        state = self.state_dict()
        return state if self.tune else {k: v for k, v in state.items() if not k.startswith("backbone.")}


@torch.no_grad()
def labels_of_image(model: LinearSegmenter, image: Tensor, patch: int, size: int) -> np.ndarray:
    """Return the classes (H, W) of an image of any size, 1..K, from overlapping windows of the training size.

    The image is padded by reflection to whole patches; where windows overlap, probabilities are blended.

    Args:
        model: in evaluation mode.
        image: (3, H, W), normalised.
        patch: side of a patch in pixels.
        size: side of a window in pixels, a multiple of the patch.
    """
    device = model.classifier.weight.device
    h, w = image.shape[-2:]
    top, bottom, left, right = padding(h, w, patch, (size, size))
    framed = np.pad(image.numpy(), ((0, 0), (top, bottom), (left, right)), mode="symmetric")
    height, width = framed.shape[1:]
    k = model.classifier.out_channels
    blend = Blend(height, width, k)
    for region in tiles(height, width, (size, size), patch):
        cut = torch.from_numpy(np.ascontiguousarray(framed[(slice(None), *region.slices)]))
        scores = model(cut[None].to(device))[0].softmax(0)
        blend.add(region, scores.permute(1, 2, 0).cpu().numpy(), window(size, size))
    return blend.result()[:, top : top + h, left : left + w].argmax(0) + 1


def score(model: LinearSegmenter, part: Part, patch: int, size: int) -> dict[str, Any]:
    """Score images by dataset mIoU: intersections and unions are summed over all images before they are divided.

    Args:
        model: any mode; it is scored in evaluation mode.
        part: images and masks to score.
        patch: side of a patch in pixels.
        size: side of a window in pixels.

    Returns:
        JSON values: 'miou' over the classes that occur, 'iou' by class (None where a class does not occur),
        'pixel_accuracy', 'images' with the mIoU of each, and the 'confusion' matrix, rows are the truth.
    """
    mode = model.training
    model.eval()
    k = model.classifier.out_channels
    total = np.zeros((k, k), np.int64)
    images = {}
    for number, name in zip(part.numbers, part.names, strict=True):
        image, mask = part.pairs.read(number)
        own = confusion(mask.numpy() + 1, labels_of_image(model, image, patch, size), k)
        images[name] = json_list([miou(own)])[0]
        total += own
    model.train(mode)
    return {
        "miou": json_list([miou(total)])[0],
        "iou": json_list(ious(total)),
        "pixel_accuracy": float(np.trace(total) / max(int(total.sum()), 1)),
        "images": images,
        "confusion": total.tolist(),
    }
