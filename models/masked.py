"""Pretrain a small ViT from scratch by masked image modelling: 60 % of the patches are masked and reconstructed.

    python models/masked.py --pos-embed learned --out runs/learned [--steps 400] [--folders images/]

Masked patches are set to grey in the image itself, which works with any encoding and model. The target of a masked
patch is its pixels, as in SimMIM (Xie et al., arXiv 2111.09886) but with the squared error. With `--shown`, the loss
includes the visible patches, so that features retain more content. Writes `weights.safetensors` and `card.json`; an
interrupted run resumes from `state.pt`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.layers import build_sincos2d_pos_embed
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import vispe
from vispe.train.loop import TrainingStep

if __package__:
    from models import training_images as data
else:
    import training_images as data


_TEMPERATURE = 20.0  # the longest wavelength of a sincos table is 2 pi times this number of patches


@dataclass(frozen=True)
class Recipe:
    """Model and training settings.

    Attributes:
        img_size: image size in pixels.
        patch_size: patch size in pixels.
        dim: embedding dimension.
        depth: number of blocks.
        num_heads: number of attention heads.
        symmetric: keep the patch kernel symmetric by averaging it over D4 after each step.
        textures: number of synthetic images.
        steps: optimizer steps.
        batch_size: images per step.
        lr: peak learning rate, after a linear warm-up over 10 % of the steps, followed by cosine decay.
        hidden: fraction of masked patches.
        shown: loss weight of visible patches relative to masked patches.
        kernel_std: standard deviation of the initial patch kernel; 0: timm's initialization, whose tokens are larger
            than the values of timm's position table.
        table: initial values of timm's learned table (`learn`): 'normal' (timm's initialization) or 'sincos'.
        table_std: standard deviation of the initial table.
        seed: seed of weights, images and masks.
    """

    img_size: int = 96
    patch_size: int = 8
    dim: int = 128
    depth: int = 4
    num_heads: int = 4
    symmetric: bool = False
    textures: int = 300
    steps: int = 400
    batch_size: int = 16
    lr: float = 1.5e-3
    hidden: float = 0.6
    shown: float = 0.0
    kernel_std: float = 0.0
    table: str = "normal"
    table_std: float = 0.02
    seed: int = 0


def backbone(pos_embed: str, recipe: Recipe) -> VisionTransformer:
    """Return the untrained ViT without classifier and class token, for images of any size.

    Args:
        pos_embed: name or spec of an encoding, or timm's `learn`.
        recipe: architecture, initialization and seed.

    Raises:
        SystemExit: unknown initialization of the table, or the model has no table.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = VisionTransformer(
            img_size=recipe.img_size,
            patch_size=recipe.patch_size,
            embed_dim=recipe.dim,
            depth=recipe.depth,
            num_heads=recipe.num_heads,
            num_classes=0,
            class_token=False,
            global_pool="",
            dynamic_img_size=True,
            pos_embed="learn",
        )
        if recipe.kernel_std:
            nn.init.normal_(model.patch_embed.proj.weight, std=recipe.kernel_std)
        _init_table(model, pos_embed, recipe)
        if pos_embed != "learn":
            vispe.convert(model, pos_embed)
    return vispe.symmetrize(model) if recipe.symmetric else model


def _init_table(model: VisionTransformer, pos_embed: str, recipe: Recipe) -> None:
    """Initialize a learned table if the recipe differs from timm's initialization."""
    if (recipe.table, recipe.table_std) == (Recipe.table, Recipe.table_std):
        return
    if pos_embed != "learn":
        raise SystemExit(f"`table` and `table_std` need `pos_embed=learn`, got {pos_embed!r}.")
    if recipe.table not in ("normal", "sincos"):
        raise SystemExit(f"`table` must be 'normal' or 'sincos', got {recipe.table!r}.")
    grid = [recipe.img_size // recipe.patch_size] * 2
    with torch.no_grad():
        if recipe.table == "sincos":
            values = build_sincos2d_pos_embed(grid, dim=recipe.dim, temperature=_TEMPERATURE)
            model.pos_embed.copy_(values * (recipe.table_std * 2**0.5))
        else:
            nn.init.normal_(model.pos_embed, std=recipe.table_std)


def train(
    pos_embed: str,
    recipe: Recipe,
    pool: Sequence[Tensor],
    *,
    state: Path | None = None,
    every: int = 100,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[VisionTransformer, list[float]]:
    """Train, and return the model in evaluation mode and the loss of every step.

    The result is deterministic for one machine and number of threads, whether or not the run was interrupted.

    Args:
        pos_embed: see `backbone`.
        recipe: model and training settings.
        pool: images (3, H, W) uint8.
        state: checkpoint file, from which an interrupted run resumes.
        every: steps between checkpoints.
        on_step: called with the index and loss of each step.

    Raises:
        SystemExit: the checkpoint belongs to a run with other settings.
    """
    model = backbone(pos_embed, recipe).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed + 1)
        head = nn.Linear(recipe.dim, 3 * recipe.patch_size**2)
        weights = [*model.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.05, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, recipe.steps, pct_start=0.1)
        training_step = TrainingStep(optimizer, clip_grad=1.0, schedule=schedule)
        parts = {"model": model, "head": head, "optimizer": optimizer, "schedule": schedule}
        run, losses = {"pos_embed": pos_embed, **asdict(recipe)}, []
        if state is not None and state.exists():
            checkpoint = torch.load(state, weights_only=True)
            if checkpoint["run"] != run:
                raise SystemExit(
                    f"{state} belongs to another run ({checkpoint['run']}). Choose another folder."
                )
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            losses = checkpoint["losses"]
            torch.set_rng_state(checkpoint["rng"])
        for step in range(len(losses), recipe.steps):
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
            images = (data.crops(pool, recipe.batch_size, recipe.img_size, generator) - 0.5) * 4
            loss = reconstruction_loss(model, head, images, recipe, generator)
            training_step(loss.backward)
            if recipe.symmetric:
                vispe.symmetrize(model)
            losses.append(float(loss.detach()))
            if state is not None and (len(losses) % every == 0 or len(losses) == recipe.steps):
                states = {name: part.state_dict() for name, part in parts.items()}
                partial = state.with_name(f"{state.name}.part")
                torch.save({**states, "losses": losses, "run": run, "rng": torch.get_rng_state()}, partial)
                partial.replace(state)
            if on_step is not None:
                on_step(step, losses[-1])
    return model.eval(), losses


def reconstruction_loss(
    model: nn.Module, head: nn.Module, images: Tensor, recipe: Recipe, generator: torch.Generator
) -> Tensor:
    """Return the mean squared error of the masked patches of normalised images (b, 3, side, side).

    The error of the visible patches is added with weight `recipe.shown`.
    """
    patches = F.pixel_unshuffle(images, recipe.patch_size)  # (b, 3 p², g, g)
    b, _, h, w = patches.shape
    order = torch.rand(b, h * w, generator=generator).argsort(1)
    mask = (order < round(recipe.hidden * h * w)).reshape(b, 1, h, w)
    masked_images = F.pixel_shuffle(patches.masked_fill(mask, 0.0), recipe.patch_size)
    target = patches.permute(0, 2, 3, 1).flatten(1, 2)
    prediction = head(model(masked_images))
    mask = mask.flatten(1)
    loss = F.mse_loss(prediction[mask], target[mask])
    return loss + recipe.shown * F.mse_loss(prediction[~mask], target[~mask]) if recipe.shown else loss


def card(pos_embed: str, recipe: Recipe, losses: Sequence[float], **more: Any) -> dict[str, Any]:
    """Return the model card."""
    tail = losses[-max(1, len(losses) // 20) :]
    return {
        "model": "VisionTransformer",
        "pos_embed": pos_embed,
        "recipe": asdict(recipe),
        "loss": round(sum(tail) / len(tail), 4),
        "versions": {"vispe": vispe.__version__, "torch": torch.__version__},
        **more,
    }


def main() -> None:
    """Parse the command line, train one model and write its weights and card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pos-embed", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="folders of further images")
    for f in fields(Recipe):
        if f.name == "symmetric":
            parser.add_argument("--symmetric", action="store_true")
        else:
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    args = parser.parse_args()
    recipe = Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe)})
    args.out.mkdir(parents=True, exist_ok=True)
    pool = [*data.synthetic(recipe.textures), *data.installed(), *data.folders(args.folders)]
    start = time.process_time()

    def log_step(step: int, loss: float) -> None:
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {recipe.steps}: loss {loss:.3f}", flush=True)

    model, losses = train(args.pos_embed, recipe, pool, state=args.out / "state.pt", on_step=log_step)
    save_file(model.state_dict(), args.out / "weights.safetensors")
    facts = {"pictures": len(pool), "cpu_s": round(time.process_time() - start, 1)}
    values = card(args.pos_embed, recipe, losses, **facts)
    (args.out / "card.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
