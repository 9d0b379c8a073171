"""Stages of `first.py` beyond kernels: one image at a time, with and without a CUDA graph, and whole models."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import timing  # noqa: F401  (finds vispe)
import timm
import torch
from torch.nn import functional as F

import vispe
from vispe import Grid
from vispe.attention import DistanceBias, TableBias
from vispe.evaluate.speed.timing import quartiles, timed, warm

GRIDS = (Grid((14, 14), 1), Grid((16, 16), 1), Grid((32, 32), 1), Grid((37, 37), 1))
MODELS = (
    ("vit_small_patch16_224", 224, 128),
    ("vit_base_patch16_224", 224, 64),
    ("vit_small_patch14_dinov2", 518, 16),
)
ENCODINGS = ("learn", "alibi2d", "rpb")  # timm's own table, a fixed bias, a learned one


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds (quartiles) of one forward call for one sample, as called and as a CUDA graph that is replayed."""
    device, heads = ("cpu", 2) if args.dry else ("cuda", 12)
    width, dtype = (16, torch.float32) if args.dry else (64, torch.bfloat16)
    found: dict[str, Any] = {}
    for grid in (Grid((3, 4), 1),) if args.dry else GRIDS:
        pos = grid.positions(device)
        q, k, v = (torch.randn(1, heads, grid.tokens, width, device=device, dtype=dtype) for _ in range(3))
        table = torch.randn(heads, *(2 * n - 1 for n in grid.shape), device=device)
        distance, learned = DistanceBias((0.5,) * heads, pos), TableBias(table, pos)
        mask = distance.dense().to(dtype)
        calls: dict[str, Callable[[], Any]] = {
            "vispe distance": lambda: vispe.attention(q, k, v, bias=distance, backend="triton"),  # noqa: B023
            "vispe table": lambda: vispe.attention(q, k, v, bias=learned, backend="triton"),  # noqa: B023
            "sdpa no bias": lambda: F.scaled_dot_product_attention(q, k, v),  # noqa: B023
            "sdpa dense bias kept": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),  # noqa: B023
        }
        for name, call in calls.items():
            row = found[f"{'x'.join(map(str, grid.shape))}+{grid.prefix} {name}"] = {
                "called": spread(call, device)
            }
            try:
                row["replayed"] = spread(captured(call), device) if device == "cuda" else None
            except RuntimeError as error:  # what cannot be captured is a result
                row["replayed"] = f"{type(error).__name__}: {error}"[:200]
    return found


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


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Images a second of whole ViTs in bfloat16, forward and a training step, stock and with an encoding."""
    device = "cpu" if args.dry else "cuda"
    found: dict[str, Any] = {}
    cases = (("vit_tiny_patch16_224", 32, 1),) if args.dry else MODELS
    for (arch, size, batch), spec in product(cases, ENCODINGS):
        small = {"depth": 1} if args.dry else {}
        torch.manual_seed(0)
        model = timm.create_model(arch, img_size=size, num_classes=10, pos_embed=spec, **small).to(device)
        images = torch.randn(batch, 3, size, size, device=device)
        for name, step in (("forward", forward(model, images)), ("training step", training(model, images))):
            low, middle, high = spread(step, device, 1 if args.dry else 20)
            found[f"{arch} {size} px b{batch} {spec} {name}"] = {
                "images_per_s": round(1000 * batch / middle, 1), "ms": [low, middle, high],
            }  # fmt: skip
        del model
    return found


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
