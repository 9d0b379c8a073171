"""Benchmark of the forward pass of ViT-S/14 at 518 px with each encoding, relative to the stock model (CPU time).

    python eval/bench/vit_ratios.py [alibi2d ...] [--rounds 15] [--depth 4] [--out eval/results/vit_ratios.json]

One image, 1,370 tokens, float32 (seqpe: bfloat16). A round runs the stock model before and after all encodings; the
ratio is the mean of both over the time of the encoding, so 1 is the speed of the stock model. Times are CPU seconds of
the process, which depend less on other processes than wall-clock times. On a busy machine other processes evict the
caches of the processor, so each row also has the ratio of the shortest times. Rows of other encodings remain in the
file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timing import environment

import vispe

RESULTS = Path(__file__).parents[1] / "results"
ARCHITECTURE, IMG_SIZE = "vit_small_patch14_dinov2", 518
TARGETS = {
    "alibi2d": 0.95, "rpb": 0.94, "irpe": 0.88, "t5": 0.94, "lookhere": 0.92, "seqpe": 0.90, "rope_mixed": 0.98,
    "gta": 0.98,
}  # fmt: skip
HALF = ("seqpe",)  # measured in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encodings", nargs="*", default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--out", type=Path, default=RESULTS / "vit_ratios.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    old = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {row["encoding"]: row for row in old}
    for dtype in (torch.float32, torch.bfloat16):
        specs = [spec for spec in args.encodings if (spec in HALF) == (dtype == torch.bfloat16)]
        for row in measure(specs, dtype, args.depth, args.rounds) if specs else ():
            rows[row["encoding"]] = row
            print(row, flush=True)
        text = json.dumps(
            {"environment": environment(), "depth": args.depth, "rows": list(rows.values())}, indent=1
        )
        args.out.write_text(text + "\n")


@torch.inference_mode()
def measure(specs: list[str], dtype: torch.dtype, depth: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per encoding: the median and the quartiles of its ratios, and the ratio of the shortest times."""
    torch.manual_seed(0)
    models = {
        spec: timm.create_model(
            ARCHITECTURE,
            img_size=IMG_SIZE,
            num_classes=0,
            depth=depth,
            **({} if spec == "stock" else {"pos_embed": spec}),
        )
        .eval()
        .to(dtype)
        for spec in ("stock", *specs)
    }
    image = torch.randn(1, 3, IMG_SIZE, IMG_SIZE, dtype=dtype)
    for model in models.values():
        # masks are cached from the second call on
        for _ in range(3):
            model(image)
    stock = models.pop("stock")
    times: dict[str, list[float]] = {spec: [] for spec in specs}
    stock_times: list[tuple[float, float]] = []
    for index in range(rounds):
        before = seconds(lambda: stock(image))
        # in alternating order
        for spec in specs[:: 1 if index % 2 == 0 else -1]:
            times[spec].append(seconds(lambda model=models[spec]: model(image)))
        stock_times.append((before, seconds(lambda: stock(image))))
    again = statistics.median(before / after for before, after in stock_times)
    shortest = min(min(pair) for pair in stock_times)
    rows: list[dict[str, Any]] = []
    for spec, own in times.items():
        ratios = [(before + after) / 2 / t for (before, after), t in zip(stock_times, own, strict=True)]
        low, middle, high = (round(x, 3) for x in statistics.quantiles(ratios, n=4))
        rows.append({
            "encoding": spec, "dtype": str(dtype).removeprefix("torch."), "ratio": middle, "quartiles": [low, high],
            "ratio_of_shortest": round(shortest / min(own), 3), "target": TARGETS.get(spec),
            "stock_to_stock": round(again, 3), "rounds": rounds,
        })  # fmt: skip
    return rows


def seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
