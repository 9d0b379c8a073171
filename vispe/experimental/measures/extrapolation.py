"""Length extrapolation: a synthetic task for training on one grid and evaluating on others.

Follows "The Impact of Positional Encoding on Length Generalization in Transformers" (arXiv 2305.19466) in comparing
encodings on lengths that do not occur in training; the task is ours. A scene is a grid of patches, a few of which are
coloured markers. The model predicts for every patch the colour of the nearest marker (needs distance), and of the
nearest marker above it (needs direction). Both targets are defined on a grid of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.distributed import POSITIONS, Processes
from vispe.encodings.positions import set_progress
from vispe.encodings.registry import Spec
from vispe.errors import OptionError
from vispe.hosts.convert import convert
from vispe.train.loop import TrainingStep
from vispe.utils.options import Options, PositiveFloat, PositiveInt

PATCH = 4  # pixels
PALETTE = ((1.0, 0.1, 0.1), (0.1, 1.0, 0.1), (0.1, 0.1, 1.0), (1.0, 1.0, 0.1))
QUESTIONS = ("distance", "direction")


class Scenes(NamedTuple):
    """A batch of scenes: images (b, 3, 4 h, 4 w), and target colours of both questions per patch.

    Answers are (b, questions, h, w) int64; -1 for patches with two equally near colours, or without a marker above.
    """

    images: Tensor
    answers: Tensor


def scenes(
    count: int, shape: tuple[int, int], generator: torch.Generator, markers: int = 3, noise: float = 0.1
) -> Scenes:
    """Return random scenes.

    Args:
        count: number of scenes, b.
        shape: patches (h, w).
        generator: random generator.
        markers: coloured patches per scene, at different positions.
        noise: standard deviation of Gaussian noise on every pixel.

    Raises:
        OptionError: there are more markers than patches.

    >>> scenes(2, (3, 4), torch.Generator().manual_seed(0)).answers.shape
    torch.Size([2, 2, 3, 4])
    """
    h, w = shape
    if not 1 <= markers <= h * w:
        raise OptionError(
            f"scenes: markers must be in 1 to {h * w} for {h} x {w} patches, got {markers}. Use fewer."
        )
    positions = torch.rand(count, h * w, generator=generator).argsort(1)[:, :markers]
    colours = torch.randint(len(PALETTE), (count, markers), generator=generator)
    tiles = torch.full((count, h * w, 3), 0.5)
    tiles.scatter_(1, positions[..., None].expand(-1, -1, 3), torch.tensor(PALETTE)[colours])
    images = tiles.unflatten(1, (h, w)).permute(0, 3, 1, 2).repeat_interleave(PATCH, 2)
    images = images.repeat_interleave(PATCH, 3)
    images = images + noise * torch.randn(images.shape, generator=generator)
    cells = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1).flatten(0, 1)
    step = cells[:, None] - cells[positions][:, None]  # (b, patches, markers, 2)
    squared = step.square().sum(-1).float()
    above = squared.masked_fill(step[..., 0] <= 0, float("inf"))
    answers = torch.stack([_nearest(squared, colours), _nearest(above, colours)], 1)
    return Scenes(images, answers.unflatten(2, (h, w)))


def _nearest(squared: Tensor, colours: Tensor) -> Tensor:
    """Return the colour (b, patches) of the nearest marker, -1 if it is ambiguous or missing."""
    best, which = squared.min(-1)
    answer = colours.gather(1, which)
    tied = (squared == best[..., None]) & (colours[:, None] != answer[..., None])
    return answer.masked_fill(tied.any(-1) | best.isinf(), -1)


class SceneViT(nn.Module):
    """A small ViT with one prediction per patch and question.

    Args:
        spec: positional encoding.
        shape: patches (h, w) of the training grid.
        dim: embedding dimension.
        depth: number of blocks.
        num_heads: number of heads.
    """

    def __init__(
        self, spec: Spec, shape: tuple[int, int], dim: int = 64, depth: int = 3, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.body = VisionTransformer(
            img_size=(shape[0] * PATCH, shape[1] * PATCH),
            patch_size=PATCH,
            embed_dim=dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=2.0,
            num_classes=0,
            class_token=False,
            global_pool="",
            dynamic_img_size=True,
            pos_embed="learn",
        )
        convert(self.body, spec)
        self.head = nn.Linear(dim, len(QUESTIONS) * len(PALETTE))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, colours, questions, h, w)."""
        h, w = images.shape[-2] // PATCH, images.shape[-1] // PATCH
        logits = self.head(self.body(images))
        return logits.unflatten(1, (h, w)).unflatten(3, (len(QUESTIONS), -1)).permute(0, 4, 3, 1, 2)


@dataclass(frozen=True)
class ExtrapolationRecipe(Options):
    """Training configuration: grid, steps, batch size, peak learning rate; width, depth and heads of the model."""

    shape: tuple[PositiveInt, PositiveInt] = (6, 6)
    steps: PositiveInt = 600
    batch_size: PositiveInt = 48
    lr: PositiveFloat = 3e-3
    dim: PositiveInt = 64
    depth: PositiveInt = 3
    num_heads: PositiveInt = 4


def train(
    spec: Spec,
    seed: int,
    recipe: ExtrapolationRecipe | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> SceneViT:
    """Train a model from scratch on random scenes of one grid.

    Args:
        spec: positional encoding.
        seed: random seed of the weights and the scenes.
        recipe: training configuration; the default takes well under a minute on one core.
        on_step: called with the index of each step and its loss.
    """
    recipe = recipe or ExtrapolationRecipe()
    torch.manual_seed(seed)
    model = SceneViT(spec, recipe.shape, recipe.dim, recipe.depth, recipe.num_heads).train()
    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    training_step = TrainingStep(optimizer, clip_grad=1.0, schedule=schedule)
    for step in range(recipe.steps):
        set_progress(model, step / recipe.steps, seed=Processes().seed(seed, step, POSITIONS))
        batch = scenes(recipe.batch_size, recipe.shape, generator)
        loss = F.cross_entropy(model(batch.images), batch.answers, ignore_index=-1)
        training_step(loss.backward)
        if on_step is not None:
            on_step(step, float(loss.detach()))
    set_progress(model, 1.0)
    return model.eval()


@torch.inference_mode()
def score(
    model: nn.Module, shape: tuple[int, int], count: int = 256, seed: int = 0, batch_size: int = 64
) -> dict[str, float]:
    """Return the accuracy per question on a grid, over the patches with an answer.

    Args:
        model: maps images (b, 3, 4 h, 4 w) to logits (b, colours, questions, h, w), like `SceneViT`.
        shape: patches (h, w).
        count: number of scenes.
        seed: random seed of the scenes, which are the same for every model.
        batch_size: number of scenes per forward pass; other numbers draw other scenes.
    """
    generator = torch.Generator().manual_seed(seed)
    correct, total = torch.zeros(len(QUESTIONS)), torch.zeros(len(QUESTIONS))
    for start in range(0, count, batch_size):
        batch = scenes(min(batch_size, count - start), shape, generator)
        predicted = model(batch.images).argmax(1)
        correct += (predicted == batch.answers).sum((0, 2, 3))
        total += (batch.answers >= 0).sum((0, 2, 3))
    return {name: float(c / t) for name, c, t in zip(QUESTIONS, correct, total, strict=True)}
