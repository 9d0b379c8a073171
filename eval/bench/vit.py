"""ViT-S forward with an encoding against the same ViT with its learned table, on this machine.

    python eval/bench/vit.py [--pos-embed alibi2d] [--rounds 15] [--out eval/results/vit_cpu.json]

Both models have the same weights and run in turn. The numbers are speeds relative to the stock model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import timm
import torch
from timing import compare, environment

import vispe

TARGETS = {224: 0.95, 518: 0.85}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pos-embed", nargs="+", default=["alibi2d", "alibi2d.geometric"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "vit_cpu.json")
    args = parser.parse_args()
    rows = []
    for spec in args.pos_embed:
        for arch, patch in (("vit_small_patch16_224", 16), ("vit_small_patch14_dinov2", 14)):
            for size in (224, 518):
                for dtype in (torch.float32, torch.bfloat16):
                    for batch in (1, 8):
                        rows.append(measure(spec, arch, patch, size, batch, dtype, args.rounds))
                        print(*(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


@torch.inference_mode()
def measure(spec: str, arch: str, patch: int, size: int, batch: int, dtype: torch.dtype, rounds: int) -> dict:
    torch.manual_seed(0)
    stock = timm.create_model(arch, img_size=size, num_classes=0).eval()
    ours = timm.create_model(arch, img_size=size, num_classes=0, pos_embed=spec).eval()
    ours.load_state_dict(stock.state_dict())
    stock, ours = stock.to(dtype), ours.to(dtype)
    image = torch.randn(batch, 3, size, size, dtype=dtype)
    fewer = max(5, rounds // (4 if size > 300 and batch > 1 else 1))
    found = compare(lambda: stock(image), lambda: ours(image), fewer)
    return {
        "pos_embed": spec,
        "model": f"ViT-S/{patch}",
        "size": size,
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        **found,
        "target": TARGETS[size],
    }


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
