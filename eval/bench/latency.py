"""Stages of `first.py` beyond kernels: one image at a time, with and without a CUDA graph, and whole models."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import timing  # noqa: F401  (finds vispe)
import timm
import torch
from stages import Results
from torch.nn import functional as F

import vispe
from vispe import Grid
from vispe.attention import DistanceBias, TableBias
from vispe.experimental.speed.timing import quartiles, timed, warm

GRIDS = (Grid((14, 14), 1), Grid((16, 16), 1), Grid((32, 32), 1), Grid((37, 37), 1))
MODELS = (
    ("vit_small_patch16_224", 224, 128),
    ("vit_base_patch16_224", 224, 64),
    ("vit_small_patch14_dinov2", 518, 16),
)
ENCODINGS = ("learn", "alibi2d", "rpb")  # timm's own table, a fixed bias, a learned one


def replay(args: argparse.Namespace, results: Results) -> None:
    """Measure milliseconds (quartiles) of a forward call for one sample: called, and replayed as a CUDA graph."""
    device = "cpu" if args.dry_run else "cuda"
    for grid in (Grid((3, 4), 1),) if args.dry_run else GRIDS:
        for name, call in calls(grid, device, args.dry_run).items():
            key = f"{'x'.join(map(str, grid.shape))}+{grid.prefix} {name}"
            if key in results:
                continue
            row: dict[str, Any] = {"called": spread(call, device)}
            try:
                row["replayed"] = spread(captured(call), device) if device == "cuda" else None
            # a call that cannot be captured is a result
            except RuntimeError as error:
                row["replayed"] = f"{type(error).__name__}: {error}"[:200]
            results[key] = row


def calls(grid: Grid, device: str, dry: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls of `replay` on a grid by name."""
    heads, width, dtype = (2, 16, torch.float32) if dry else (12, 64, torch.bfloat16)
    pos = grid.positions(device)
    q, k, v = (torch.randn(1, heads, grid.tokens, width, device=device, dtype=dtype) for _ in range(3))
    table = torch.randn(heads, *(2 * n - 1 for n in grid.shape), device=device)
    distance, learned = DistanceBias((0.5,) * heads, pos), TableBias(table, pos)
    mask = distance.dense().to(dtype)
    return {
        "vispe distance": lambda: vispe.attention(q, k, v, bias=distance, backend="triton"),
        "vispe table": lambda: vispe.attention(q, k, v, bias=learned, backend="triton"),
        "sdpa no bias": lambda: F.scaled_dot_product_attention(q, k, v),
        "sdpa dense bias cached": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    }


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        call()
    return graph.replay


def models(args: argparse.Namespace, results: Results) -> None:
    """Measure images per second of complete ViTs in bfloat16, forward and a training step, with several encodings."""
    device = "cpu" if args.dry_run else "cuda"
    cases = (("vit_tiny_patch16_224", 32, 1),) if args.dry_run else MODELS
    for (arch, size, batch), spec in product(cases, ENCODINGS):
        name = f"{arch} {size} px b{batch} {spec}"
        if f"{name} training step" in results:
            continue
        steps = step_functions(arch, size, batch, spec, device, 1 if args.dry_run else None)
        for kind, step in steps.items():
            low, middle, high = spread(step, device, 1 if args.dry_run else 20)
            results[f"{name} {kind}"] = {
                "images_per_s": round(1000 * batch / middle, 1), "ms": [low, middle, high],
            }  # fmt: skip


def step_functions(
    arch: str, size: int, batch: int, spec: str, device: str, depth: int | None = None
) -> dict[str, Callable[[], Any]]:
    """Return the steps of `models` by name; `depth` is that of the architecture by default."""
    torch.manual_seed(0)
    options = {} if depth is None else {"depth": depth}
    model = timm.create_model(arch, img_size=size, num_classes=10, pos_embed=spec, **options).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    return {"forward": forward(model, images), "training step": training(model, images)}


def forward(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], Any]:
    """Return a forward pass under autocast."""

    def step() -> Any:
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16):
            return model.eval()(images)

    return step


def training(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], Any]:
    """Return a forward and a backward pass with a step of AdamW, under autocast."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = model.train()(images).float().square().mean()
        loss.backward()
        optimiser.step()

    return step


def spread(call: Callable[[], Any], device: str, reps: int = 50) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of the milliseconds of a call."""
    cpu = device == "cpu"
    warm(lambda _: call(), device, 0.0 if cpu else 0.2)
    low, middle, high = quartiles(timed(lambda _: call(), device, 1 if cpu else reps)[0])
    return round(low, 4), round(middle, 4), round(high, 4)
