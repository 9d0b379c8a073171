"""Training of a small ViT from scratch on the three-cell benchmark, with any two-axis encoding.

An image is a grid of 14 x 14 cells, one token each, so tokens differ only by colour and by the encoding. After the
blocks of a shallow ViT, a small MLP reads the tokens of the red, green and blue cells. A readout of all
tokens would have to find three cells among 196, which is unrelated to position and would dominate the
training time. The six bits are trained with binary cross-entropy, and no image is used twice. One recipe is
used for all encodings; it takes minutes on one CPU core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.distributed import POSITIONS, Processes
from vispe.encodings.positions import set_progress
from vispe.encodings.registry import Spec, parse_spec
from vispe.errors import InputError
from vispe.experimental.three_cell import dataset
from vispe.experimental.three_cell.dataset import ThreeCellScores
from vispe.experimental.three_cell.model import ThreeCellRecipe, ThreeCellViT
from vispe.train.loop import TrainingStep
from vispe.utils.files import atomic_path
from vispe.utils.options import PositiveInt, checked

TEST_SEED = 2025  # all models are evaluated on the same images


@dataclass(frozen=True)
class ThreeCellRun:
    """Result of one training run.

    Attributes:
        encoding: spec as text.
        seed: random seed of the weights and the training images.
        scores: scores on the test images.
        majority: scores on the test images of the best constant answer on the training images.
        cpu_s: CPU seconds of training and test, over all restarts.
        recipe: training configuration.
    """

    encoding: str
    seed: int
    scores: ThreeCellScores
    majority: ThreeCellScores
    cpu_s: float
    recipe: ThreeCellRecipe

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, scores rounded to two decimals."""
        entries = asdict(self) | {"cpu_s": round(self.cpu_s, 1), "recipe": self.recipe.to_dict()}
        for key in ("scores", "majority"):
            entries[key] = {name: round(value, 2) for name, value in entries[key].items()}
        return entries


@checked
def train(
    spec: Spec,
    seed: int = 0,
    recipe: ThreeCellRecipe | None = None,
    *,
    checkpoint: str | Path | None = None,
    every: PositiveInt = 100,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[ThreeCellViT, ThreeCellRun]:
    """Train from scratch, and evaluate on held-out images.

    The same seed gives the same model, with or without interruptions, on one machine and number of threads.

    Args:
        spec: positional encoding.
        seed: random seed of the weights and the training images; the test images are always the same.
        recipe: configuration; `ThreeCellRecipe()` by default.
        checkpoint: checkpoint file, from which an interrupted training resumes; it is not deleted.
        every: steps between two checkpoints.
        on_step: called with the index of each step and its loss.

    Raises:
        OptionError: a value of the recipe, or `every`, is too small.
        InputError: the checkpoint belongs to another encoding, seed or recipe, or the file is not a checkpoint.
    """
    recipe = recipe or ThreeCellRecipe()
    name = str(spec) if isinstance(spec, str) else " + ".join(str(term) for term in parse_spec(spec))
    run = {"encoding": name, "seed": seed, "recipe": recipe.to_dict()}
    file = None if checkpoint is None else Path(checkpoint)
    restored = _read(file, run)
    start = time.process_time() - (restored["cpu_s"] if restored else 0.0)
    test = dataset.sample_cells(recipe.test, recipe.grid, torch.Generator().manual_seed(TEST_SEED))
    cells = _training_cells(recipe, seed, test)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ThreeCellViT(spec, recipe).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.01)
        training_step = TrainingStep(optimizer, clip_grad=1.0)
        stateful = {"model": model, "optimizer": optimizer}
        if restored:
            for key, part in stateful.items():
                part.load_state_dict(restored[key])
            torch.set_rng_state(restored["rng"])
        for step in range(restored["step"] if restored else 0, recipe.steps):
            set_progress(model, step / recipe.steps, seed=Processes().seed(seed, step, POSITIONS))
            batch = cells[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            bits = dataset.labels(batch, recipe.grid).float()
            rendered = dataset.images(batch, recipe.grid, patch_size=1)
            loss = F.binary_cross_entropy_with_logits(model(rendered), bits)
            training_step(loss.backward, recipe.lr * _share(step, recipe.steps))
            if file is not None and ((step + 1) % every == 0 or step + 1 == recipe.steps):
                state = {key: part.state_dict() for key, part in stateful.items()}
                state |= {"step": step + 1, "cpu_s": time.process_time() - start}
                with atomic_path(file, force=True) as part:
                    torch.save({**state, "rng": torch.get_rng_state(), "run": run}, part)
            if on_step is not None:
                on_step(step, float(loss.detach()))
        set_progress(model, 1.0)
        bits = dataset.labels(test, recipe.grid)
        scores = dataset.score(logits(model.eval(), test, recipe.grid), bits)
    constant = dataset.majority(bits, dataset.labels(cells, recipe.grid))
    return model, ThreeCellRun(name, seed, scores, constant, time.process_time() - start, recipe)


@torch.inference_mode()
def logits(model: nn.Module, cells: Tensor, grid: int = 14, batch_size: int = 100) -> Tensor:
    """Return the logits (n, 6) of a model for images with one pixel per cell.

    Args:
        model: maps images (b, 3, grid, grid) to logits (b, 6).
        cells: (x, y) of red, green and blue, (n, 3, 2).
        grid: cells per side.
        batch_size: images per forward pass.
    """
    return torch.cat([model(dataset.images(part, grid, patch_size=1)) for part in cells.split(batch_size)])


def _share(step: int, steps: int) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then cosine decay to 0."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def _training_cells(recipe: ThreeCellRecipe, seed: int, test: Tensor) -> Tensor:
    """Return the cells of all steps (steps * batch, 3, 2), excluding test images."""
    count, generator = recipe.steps * recipe.batch_size, torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    while sum(map(len, parts)) < count:
        drawn = dataset.sample_cells(count, recipe.grid, generator)
        parts.append(drawn[~torch.isin(_number(drawn, recipe.grid), _number(test, recipe.grid))])
    return torch.cat(parts)[:count]


def _number(cells: Tensor, grid: int) -> Tensor:
    """Return a unique integer per image (n,) from its cells."""
    index = cells[..., 1] * grid + cells[..., 0]
    return (index[:, 0] * grid**2 + index[:, 1]) * grid**2 + index[:, 2]


def _read(file: Path | None, run: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state in the checkpoint of this run, None if there is none."""
    if file is None or not file.exists():
        return None
    try:
        restored = torch.load(file, weights_only=True)
        other = restored["run"]
    except Exception as error:  # a damaged file can raise any exception
        raise InputError(f"{file} is not a checkpoint of the three-cell training; remove it.") from error
    for key, value in run.items():
        if other[key] != value:
            raise InputError(
                f"{file} was written with {key} {other[key]}, got {value}. Choose another file, or remove it."
            )
    return restored
