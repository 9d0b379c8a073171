"""Small ViT that predicts the six bits of a three-cell image, and its recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from timm.models import VisionTransformer
from torch import Tensor, nn

from vispe.encodings.registry import Spec
from vispe.experimental.three_cell import dataset
from vispe.hosts.convert import convert
from vispe.utils.options import Options, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ThreeCellRecipe(Options):
    """Model and training configuration.

    Attributes:
        grid: cells per side.
        dim: width of the tokens.
        depth: number of blocks.
        num_heads: number of heads.
        mlp_ratio: width of the MLP in a block, in widths of the tokens.
        hidden: width of the MLP that reads the three tokens.
        steps: number of training steps.
        batch_size: images per training step.
        lr: peak learning rate, after a warm-up of a tenth of the steps and before a cosine decay.
        test: number of test images.
    """

    grid: PositiveInt = 14
    dim: PositiveInt = 64
    depth: PositiveInt = 2
    num_heads: PositiveInt = 4
    mlp_ratio: PositiveFloat = 2.0
    hidden: PositiveInt = 256
    steps: PositiveInt = 500
    batch_size: PositiveInt = 16
    lr: PositiveFloat = 1e-3
    test: PositiveInt = 2000

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the keys of result files and checkpoints."""
        keys = {"batch_size": "batch", "lr": "rate"}
        return {keys.get(name, name): value for name, value in asdict(self).items()}


class ThreeCellViT(nn.Module):
    """A small ViT that predicts the six bits.

    Args:
        spec: positional encoding.
        recipe: configuration of the model.
    """

    def __init__(self, spec: Spec, recipe: ThreeCellRecipe | None = None) -> None:
        super().__init__()
        recipe = recipe or ThreeCellRecipe()
        self.body = VisionTransformer(
            img_size=recipe.grid,
            patch_size=1,
            embed_dim=recipe.dim,
            depth=recipe.depth,
            num_heads=recipe.num_heads,
            mlp_ratio=recipe.mlp_ratio,
            num_classes=0,
            class_token=False,
            global_pool="",
            pos_embed="learn",
        )
        # colours have the scale of a learned table; with larger colours the table has no effect for hundreds of steps
        nn.init.trunc_normal_(self.body.patch_embed.proj.weight, std=0.02)
        nn.init.zeros_(self.body.patch_embed.proj.bias)
        for module in self.body.blocks.modules():  # timm's std of 0.02 suits widths of 384 and more
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        convert(self.body, spec)
        self.head = nn.Sequential(
            nn.Linear(3 * recipe.dim, recipe.hidden),
            nn.GELU(),
            nn.Linear(recipe.hidden, recipe.hidden),
            nn.GELU(),
            nn.Linear(recipe.hidden, len(dataset.BITS)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, 6) of images (b, 3, grid, grid), one pixel per cell."""
        tokens = self.body(images)
        cells = images.flatten(2).argmax(-1)  # tokens of the red, green and blue cells
        return self.head(tokens.gather(1, cells[..., None].expand(-1, -1, tokens.shape[-1])).flatten(1))
