"""Ablation of a common coordinate system for two crops of one field at different magnifications.

A coarse crop shows 4 x 4 coloured patches. A fine crop, four times as large on screen, lies at a random offset inside
its field and shows nothing. Every fine patch is to be labelled with the colour of the coarse patch that covers it, so
a model must relate the two crops by position. A small transformer is trained with both crops in one coordinate system
(`Positions.joined`, with the offset of the fine crop) and with both centred at 0, as if the offset were unknown.

    python eval/two_magnifications.py            # half a minute per encoding and seed on one core
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vispe
from vispe.grid import Positions
from vispe.grid.crops import crop_positions
from vispe.utils.files import write_json
from vispe.utils.version import __version__

RESULT = Path(__file__).resolve().parent / "results" / "two_magnifications.json"
SIZE, PATCH, LEVELS, COLOURS = (4, 4), (1, 1), (1, 4), 4
PATCHES = 16  # of each crop
DIM, HEADS, DEPTH = 32, 2, 2
STEPS, BATCH, RATE, HELD = 300, 32, 3e-3, 256
SPECS = {
    "rope_muvit": "rope_muvit(temperature=100)",
    "rose.scale": "rose.scale(temperature=100)",
    "rope_axial": "rope_axial(temperature=100)",
    "alibi2d": "alibi2d(slopes=learned,normalize=none,wrap=false)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--specs", nargs="+", default=list(SPECS), choices=list(SPECS))
    args = parser.parse_args()
    rows = []
    for name in args.specs:
        for seed in range(args.seeds):
            for common in (True, False):
                start = time.perf_counter()
                accuracy = run(SPECS[name], common, seed)
                seconds = round(time.perf_counter() - start, 1)
                rows.append({"encoding": name, "common": common, "seed": seed, "accuracy": accuracy})
                print(rows[-1], f"{seconds} s", flush=True)
    if args.specs == list(SPECS):
        write_json(RESULT, report(rows), force=True)


def samples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return colours of all tokens (count, 32), 0 for fine ones, labels (count, 16) and boxes (count, 2, 2, 2)."""
    colours = torch.randint(1, COLOURS + 1, (count, PATCHES), generator=generator)
    # pixels of the field, 16 x 16; the fine crop starts at a random one
    first = torch.randint(0, 13, (count, 2), generator=generator)
    steps = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    row, column = ((first[:, None] + steps) // 4).unbind(-1)
    labels = colours.gather(1, 4 * row + column) - 1
    # centres of the first and last pixel of each crop, relative to the centre of the field
    fine = torch.stack([first - 7.5, first - 4.5], 1)
    coarse = torch.tensor([[-6.0, -6.0], [6.0, 6.0]]).expand(count, -1, -1)
    inputs = torch.cat([torch.zeros_like(colours), colours], 1)
    return inputs, labels, torch.stack([fine, coarse], 1)


def positions(boxes: Tensor, common: bool) -> Positions:
    """Return the positions of both crops in one coordinate system, or each centred at 0."""
    return crop_positions(SIZE, PATCH, levels=LEVELS, boxes=boxes if common else None)


class Net(nn.Module):
    """A small transformer whose only position information is the encoding."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        self.inputs = nn.Embedding(COLOURS + 1, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH + 1))
        self.attention = nn.ModuleList(vispe.Attention(DIM, HEADS, spec) for _ in range(DEPTH))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(DEPTH)
        )
        self.head = nn.Linear(DIM, COLOURS)

    def forward(self, shown: Tensor, pos: Positions) -> Tensor:
        """Return logits of the fine patches (b, colours, 16)."""
        x = self.inputs(shown)
        for k, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * k](x), pos)
            x = x + mlp(self.norms[2 * k + 1](x))
        return self.head(self.norms[-1](x))[:, :PATCHES].mT


def run(spec: str, common: bool, seed: int) -> float:
    """Train a model and return its accuracy on fields that it was not trained on."""
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    net = Net(spec).train()
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        inputs, labels, boxes = samples(BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs, positions(boxes, common)), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    net.eval()
    inputs, labels, boxes = samples(HELD, torch.Generator().manual_seed(7))
    with torch.no_grad():
        predicted = net(inputs, positions(boxes, common)).argmax(1)
    return round(float((predicted == labels).float().mean()), 4)


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the result file."""
    summary: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        frame = "one coordinate system" if row["common"] else "each centred at 0"
        summary.setdefault(row["encoding"], {}).setdefault(frame, []).append(row["accuracy"])
    return {
        "what": __doc__.splitlines()[0],
        "versions": {"vispe": __version__, "torch": torch.__version__},
        "model": {"dim": DIM, "heads": HEADS, "depth": DEPTH, "steps": STEPS, "batch": BATCH},
        "summary": {
            name: {f: [min(v), max(v)] for f, v in frames.items()} for name, frames in summary.items()
        },
        "rows": rows,
    }


if __name__ == "__main__":
    main()
