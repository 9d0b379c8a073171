"""Linear segmentation model: batch norm, dropout and a 1x1 convolution on the patch features of a backbone."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vispe.backbones.model_access import final_tokens
from vispe.backbones.vision_model import VisionModel
from vispe.segment.features.blend import Blend, window
from vispe.segment.features.tiles import padding, tiles
from vispe.segment.metrics import confusion, ious, miou
from vispe.train.linear.dataset import Part
from vispe.utils.report.table import json_list


class LinearSegmenter(nn.Module):
    """Linear segmentation head: a 1x1 convolution on patch features, and bilinear interpolation to pixels.

    Args:
        backbone: model that computes the features.
        n_classes: K.
        norm: batch norm before the convolution.
        dropout: dropout probability of the features.
        tune: train the backbone too; otherwise the backbone remains in evaluation mode without gradients.
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
        """Set the mode; a frozen backbone remains in evaluation mode."""
        super().train(mode)
        if not self.tune:
            self.backbone.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (b, K, H, W) of normalised images (b, 3, H, W)."""
        # a frozen backbone needs no activations for the backward pass
        with torch.set_grad_enabled(self.tune and torch.is_grad_enabled()):
            maps, _ = final_tokens(self.backbone, images)
        # interpolation of logits is equivalent to that of features, since the head is linear, and cheaper
        scores = self.classifier(self.dropout(self.norm(maps.float())))  # (b, K, h, w)
        return interpolate(scores, images.shape[-2:], mode="bilinear", align_corners=False)

    def trained_state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights: all except those of a frozen backbone."""
        state = self.state_dict()
        return state if self.tune else {k: v for k, v in state.items() if not k.startswith("backbone.")}


@torch.no_grad()
def labels_of_image(model: LinearSegmenter, image: Tensor, patch_size: int, size: int) -> np.ndarray:
    """Return the classes (H, W) of an image of any size, 1..K, from overlapping windows of the training size.

    The image is padded by reflection to a multiple of the patch size; probabilities of overlapping windows are blended.

    Args:
        model: model in evaluation mode.
        image: (3, H, W), normalised.
        patch_size: patch size in pixels.
        size: side of a window in pixels, a multiple of the patch size.
    """
    device = model.classifier.weight.device
    h, w = image.shape[-2:]
    top, bottom, left, right = padding(h, w, patch_size, (size, size))
    padded = np.pad(image.numpy(), ((0, 0), (top, bottom), (left, right)), mode="symmetric")
    height, width = padded.shape[1:]
    k = model.classifier.out_channels
    blend = Blend(height, width, k)
    for region in tiles(height, width, (size, size), patch_size):
        crop = torch.from_numpy(np.ascontiguousarray(padded[(slice(None), *region.slices)]))
        scores = model(crop[None].to(device))[0].softmax(0)
        blend.add(region, scores.permute(1, 2, 0).cpu().numpy(), window(size, size))
    return blend.result()[:, top : top + h, left : left + w].argmax(0) + 1


def score(model: LinearSegmenter, part: Part, patch_size: int, size: int) -> dict[str, Any]:
    """Return the dataset mIoU: intersections and unions are summed over all images before the division.

    Args:
        model: model in any mode; it is evaluated in evaluation mode.
        part: images and masks to score.
        patch_size: patch size in pixels.
        size: side of a window in pixels.

    Returns:
        JSON values: 'miou' over the classes that occur, 'iou' by class (None if a class does not occur),
        'pixel_accuracy', 'images' with the mIoU of each, and the 'confusion' matrix with the ground truth in rows.
    """
    mode = model.training
    model.eval()
    k = model.classifier.out_channels
    total = np.zeros((k, k), np.int64)
    images = {}
    for number, name in zip(part.numbers, part.names, strict=True):
        image, mask = part.pairs.read(number)
        matrix = confusion(mask.numpy() + 1, labels_of_image(model, image, patch_size, size), k)
        images[name] = json_list([miou(matrix)])[0]
        total += matrix
    model.train(mode)
    return {
        "miou": json_list([miou(total)])[0],
        "iou": json_list(ious(total)),
        "pixel_accuracy": float(np.trace(total) / max(int(total.sum()), 1)),
        "images": images,
        "confusion": total.tolist(),
    }
