"""Ablation of `Grid.spacing`: alibi3d with and without it, on volumes with anisotropic voxels.

A volume is a grid of voxels, a few of which are coloured markers; the target of every voxel is the colour of the
nearest marker, in millimetres. Voxels are 5 x 1 x 1 mm, as in a CT with thick slices, or slices of different volumes
have distances of 1 to 5 mm. A small transformer is trained with `Grid.spacing` and without; nothing else differs. It is
scored on new volumes, and on slices of other thickness. Finished runs are stored, so that an interrupted run resumes.

    python eval/spacing.py
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vispe
from vispe.utils.files import write_json
from vispe.utils.version import __version__

RESULT = Path(__file__).resolve().parent / "results" / "spacing.json"
SHAPE, MARKERS, COLOURS = (4, 10, 10), 4, 4
DIM, HEADS, DEPTH = 64, 4, 3
STEPS, BATCH, RATE, HELD, SEEDS = 600, 16, 1e-3, 128, 3
TRAINED = {"5 mm": (5.0,), "1 to 5 mm": (1.0, 2.0, 3.5, 5.0)}
ASKED = (1.0, 2.0, 3.0, 5.0, 8.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    fresh = parser.parse_args().fresh
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() and not fresh else []
    done = {(row["slices"], row["spacing"], row["seed"]) for row in rows}
    for seed in range(SEEDS):
        for slices in TRAINED:
            for spacing in (True, False):
                if (slices, spacing, seed) in done:
                    continue
                began = time.perf_counter()
                result = run(TRAINED[slices], spacing, seed)
                rows.append({"slices": slices, "spacing": spacing, "seed": seed, "accuracy": result})
                write_json(RESULT, report(rows), force=True)
                print(slices, spacing, seed, result, f"{time.perf_counter() - began:.0f} s", flush=True)
    print(json.dumps(report(rows)["summary"], indent=1))


def volumes(count: int, thickness: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return colours of voxels (count, n), 0 where there is no marker, and the answers (count, n), -1 where tied.

    Args:
        count: of volumes.
        thickness: (count,) distance between slices, in units of that within a slice.
        generator: source of all randomness.
    """
    cells = torch.cartesian_prod(*(torch.arange(n) for n in SHAPE)).float()
    positions = torch.rand(count, len(cells), generator=generator).argsort(1)[:, :MARKERS]
    colours = torch.randint(1, COLOURS + 1, (count, MARKERS), generator=generator)
    scale = torch.stack([thickness, torch.ones(count), torch.ones(count)], -1)
    # squared distances in millimetres (count, voxels, markers)
    squared = ((cells[:, None] - cells[positions][:, None]) * scale[:, None, None]).square().sum(-1)
    best, which = squared.min(-1)
    targets = colours.gather(1, which)
    tied = (squared == best[..., None]) & (colours[:, None] != targets[..., None])
    inputs = torch.zeros(count, len(cells), dtype=torch.int64).scatter_(1, positions, colours)
    return inputs, (targets - 1).masked_fill(tied.any(-1), -1)


class Net(nn.Module):
    """A small transformer with one answer per voxel; all that it knows of positions is alibi3d."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Embedding(COLOURS + 1, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH + 1))
        self.attention = nn.ModuleList(vispe.Attention(DIM, HEADS, "alibi3d") for _ in range(DEPTH))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(DEPTH)
        )
        self.head = nn.Linear(DIM, COLOURS)

    def forward(self, shown: Tensor, grid: vispe.Grid) -> Tensor:
        """Return logits (b, colours, n)."""
        x = self.inputs(shown)
        for k, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * k](x), grid)
            x = x + mlp(self.norms[2 * k + 1](x))
        return self.head(self.norms[-1](x)).mT


def run(trained: tuple[float, ...], spacing: bool, seed: int) -> dict[str, float]:
    """Train a model on slices of some thickness, and return its accuracy on others."""
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    net = Net().train()
    steps = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(steps, RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        # one grid per batch, since positions belong to the grid
        thick = trained[step % len(trained)]
        inputs, answers = volumes(BATCH, torch.full((BATCH,), thick), generator)
        steps.zero_grad()
        F.cross_entropy(net(inputs, grid(thick, spacing)), answers, ignore_index=-1).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        plan.step()
    net.eval()
    return {f"{thick:g} mm": accuracy(net, thick, spacing) for thick in ASKED}


def grid(thick: float, spacing: bool) -> vispe.Grid:
    """Return the grid of a volume, with the distances of its voxels or without."""
    return vispe.Grid(SHAPE, spacing=(thick, 1.0, 1.0)) if spacing else vispe.Grid(SHAPE)


@torch.no_grad()
def accuracy(net: Net, thick: float, spacing: bool) -> float:
    """Return the share of voxels answered rightly, on the same volumes for every model."""
    inputs, answers = volumes(HELD, torch.full((HELD,), thick), torch.Generator().manual_seed(7))
    result = torch.cat([net(part, grid(thick, spacing)).argmax(1) for part in inputs.split(BATCH)])
    requested = answers >= 0
    return round(float((result == answers)[requested].float().mean()), 4)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the file says."""
    summary: dict[str, Any] = {}
    for slices in TRAINED:
        for spacing in (True, False):
            own = [r["accuracy"] for r in rows if (r["slices"], r["spacing"]) == (slices, spacing)]
            if own:
                name = f"trained on {slices}, {'with' if spacing else 'without'} spacing"
                summary[name] = {
                    key: [round(min(o[key] for o in own), 4), round(max(o[key] for o in own), 4)]
                    for key in own[0]
                }
    return {
        "what": __doc__.splitlines()[0],
        "versions": {"vispe": __version__, "torch": torch.__version__},
        "model": {"shape": SHAPE, "dim": DIM, "heads": HEADS, "depth": DEPTH, "steps": STEPS, "batch": BATCH},
        "summary": summary,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
