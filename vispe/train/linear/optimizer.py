"""Optimizer of a linear segmentation: AdamW with separate learning rates for the head and a fine-tuned backbone."""

import torch

from vispe.train.linear.model import LinearSegmenter
from vispe.train.linear.task import LinearTask


def create_optimizer(task: LinearTask, model: LinearSegmenter) -> torch.optim.Optimizer:
    """Return AdamW; `rate` of each parameter group is its peak learning rate."""
    head = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    groups = [{"params": head, "rate": task.lr}]
    if model.tune:
        groups.append({"params": list(model.backbone.parameters()), "rate": task.backbone_lr})
    return torch.optim.AdamW(groups, lr=task.lr, weight_decay=task.weight_decay)
