"""Train a small ViT from scratch, without labels: three of five patches are hidden, and it fills them in.

    python models/masked.py --pos-embed learned --out runs/learned [--steps 400] [--folders pictures/]

What is hidden is set to grey in the picture itself, so that any encoding in any host takes part; the answer to each
hidden patch is its pixels, as in SimMIM (Xie et al., arXiv 2111.09886) but with squared errors. With `--shown`, the
answer to patches that are seen counts too, so that features keep more of their content. Writes `weights.safetensors`
and `card.json`; a run that was stopped goes on from `state.pt`.
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

if __package__:
    from models import training_images as data
else:
    import training_images as data


_PERIOD = 20.0  # the longest wave of a sincos table is this many patches times 2 pi


@dataclass(frozen=True)
class Recipe:
    """The model and how it is trained.

    Attributes:
        side: of an image in pixels.
        patch: side of a patch in pixels.
        dim: width of the tokens.
        depth: blocks.
        num_heads: heads.
        symmetric: keep the patch kernel symmetric, by averaging it over D4 after each step.
        textures: synthetic pictures in the pool.
        steps: updates.
        batch: images per update.
        rate: peak learning rate, after a warm-up of a tenth of the steps, then falling as a cosine.
        hidden: share of the patches that is hidden.
        shown: weight of the error of the patches that are seen, relative to that of the hidden ones.
        kernel_std: standard deviation of the initial patch kernel; 0 keeps timm's, which is larger than that of a table
            of timm, so that tokens outweigh it.
        table: initial values of timm's learned table (`learn`): 'normal' as timm draws them, or 'sincos'.
        table_std: their standard deviation.
        seed: of weights, pictures and masks.
    """

    side: int = 96
    patch: int = 8
    dim: int = 128
    depth: int = 4
    num_heads: int = 4
    symmetric: bool = False
    textures: int = 300
    steps: int = 400
    batch: int = 16
    rate: float = 1.5e-3
    hidden: float = 0.6
    shown: float = 0.0
    kernel_std: float = 0.0
    table: str = "normal"
    table_std: float = 0.02
    seed: int = 0


def backbone(pos_embed: str, recipe: Recipe) -> VisionTransformer:
    """Return the ViT, untrained: no classifier, no class token, images of any size.

    Args:
        pos_embed: a name or spec of vispe, or timm's `learn`.
        recipe: its sizes, initial values and seed.

    Raises:
        SystemExit: initial values for a table that the model does not have, or unknown ones.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = VisionTransformer(
            img_size=recipe.side,
            patch_size=recipe.patch,
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
        _fill_table(model, pos_embed, recipe)
        if pos_embed != "learn":
            vispe.convert(model, pos_embed)
    return vispe.symmetrize(model) if recipe.symmetric else model


def _fill_table(model: VisionTransformer, pos_embed: str, recipe: Recipe) -> None:
    """Set the initial values of a learned table, which stay as timm drew them by default."""
    if (recipe.table, recipe.table_std) == (Recipe.table, Recipe.table_std):
        return
    if pos_embed != "learn":
        raise SystemExit(f"Initial values of a table were given, and {pos_embed} has none; use learn.")
    if recipe.table not in ("normal", "sincos"):
        raise SystemExit(f"The table {recipe.table!r} is not normal or sincos.")
    grid = [recipe.side // recipe.patch] * 2
    with torch.no_grad():
        if recipe.table == "sincos":
            values = build_sincos2d_pos_embed(grid, dim=recipe.dim, temperature=_PERIOD)
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

    The same recipe gives the same model, stopped and continued or not, on one machine and number of threads.

    Args:
        pos_embed: see `backbone`.
        recipe: how.
        pool: pictures (3, H, W) uint8.
        state: file that the state is written to, and that a stopped training goes on from.
        every: steps between two writings of it.
        on_step: called with the number of each step and its loss.
    """
    model = backbone(pos_embed, recipe).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed + 1)
        head = nn.Linear(recipe.dim, 3 * recipe.patch**2)
        weights = [*model.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=0.05, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps, pct_start=0.1)
        parts = {"model": model, "head": head, "optimizer": optimizer, "schedule": schedule}
        run, losses = {"pos_embed": pos_embed, **asdict(recipe)}, []
        if state is not None and state.exists():
            kept = torch.load(state, weights_only=True)
            if kept["run"] != run:
                raise SystemExit(f"{state} is of another run ({kept['run']}); choose another folder.")
            for name, part in parts.items():
                part.load_state_dict(kept[name])
            losses = kept["losses"]
            torch.set_rng_state(kept["rng"])
        for step in range(len(losses), recipe.steps):
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
            images = (data.crops(pool, recipe.batch, recipe.side, generator) - 0.5) * 4
            loss = fill_in(model, head, images, recipe, generator)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            if recipe.symmetric:
                vispe.symmetrize(model)
            losses.append(float(loss.detach()))
            if state is not None and (len(losses) % every == 0 or len(losses) == recipe.steps):
                moment = {name: part.state_dict() for name, part in parts.items()}
                part = state.with_name(f"{state.name}.part")
                torch.save({**moment, "losses": losses, "run": run, "rng": torch.get_rng_state()}, part)
                part.replace(state)
            if on_step is not None:
                on_step(step, losses[-1])
    return model.eval(), losses


def fill_in(
    model: nn.Module, head: nn.Module, images: Tensor, recipe: Recipe, generator: torch.Generator
) -> Tensor:
    """Return the mean squared error of the hidden patches of normalised images (b, 3, side, side).

    With `recipe.shown`, the error of the patches that are seen is added with that weight.
    """
    patches = F.pixel_unshuffle(images, recipe.patch)  # (b, 3 p², g, g)
    b, _, h, w = patches.shape
    order = torch.rand(b, h * w, generator=generator).argsort(1)
    hidden = (order < round(recipe.hidden * h * w)).reshape(b, 1, h, w)
    seen = F.pixel_shuffle(patches.masked_fill(hidden, 0.0), recipe.patch)
    wanted = patches.permute(0, 2, 3, 1).flatten(1, 2)
    answer = head(model(seen))
    asked = hidden.flatten(1)
    loss = F.mse_loss(answer[asked], wanted[asked])
    return loss + recipe.shown * F.mse_loss(answer[~asked], wanted[~asked]) if recipe.shown else loss


def card(pos_embed: str, recipe: Recipe, losses: Sequence[float], **more: Any) -> dict[str, Any]:
    """Return what should be known about the weights."""
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
    """Train one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pos-embed", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="more pictures")
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

    def follow(step: int, loss: float) -> None:
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {recipe.steps}: loss {loss:.3f}", flush=True)

    model, losses = train(args.pos_embed, recipe, pool, state=args.out / "state.pt", on_step=follow)
    save_file(model.state_dict(), args.out / "weights.safetensors")
    spent = {"pictures": len(pool), "cpu_s": round(time.process_time() - start, 1)}
    made = card(args.pos_embed, recipe, losses, **spent)
    (args.out / "card.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
