"""Benchmark of the forward pass of ViT-S with an encoding, relative to the same ViT with its learned table.

    python eval/bench/vit.py [--pos-embed alibi2d] [--rounds 15] [--out eval/results/vit_cpu.json]
    python eval/bench/vit.py --all    (all encodings, ViT-S/16 at 224 px, to eval/results/encodings_cpu.json)

Both models have the same weights and run in turn. The numbers are speeds relative to the stock model. An interrupted
run resumes. Rows below 0.8 include the operators that take most of the time.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
from timing import compare, environment

import vispe

RESULTS = Path(__file__).parents[1] / "results"
TARGETS = {224: 0.95, 518: 0.85}
SLOW = 0.8  # below this, the row has the time of each operator
KEYS = ("pos_embed", "model", "size", "batch", "dtype")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pos-embed", nargs="+", default=["alibi2d"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fresh", action="store_true", help="measure all again, also what the file has")
    parser.add_argument("--all", action="store_true", help="all encodings, one model, one size, float32")
    parser.add_argument(
        "--patches", nargs="+", type=int, default=[16, 14], help="sides of the patches of the models"
    )
    parser.add_argument("--img-sizes", nargs="+", type=int, default=list(TARGETS), help="sides of the images")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or RESULTS / ("encodings_cpu.json" if args.all else "vit_cpu.json")
    args.out.parent.mkdir(exist_ok=True)
    retained = json.loads(args.out.read_text())["rows"] if args.out.exists() and not args.fresh else []
    rows = {tuple(r[k] for k in KEYS): r for r in retained}
    models = (("vit_small_patch16_224", 16), ("vit_small_patch14_dinov2", 14))
    dtypes = (torch.float32, torch.bfloat16)
    requested = [model for model in models if model[1] in args.patches]
    cases = product(args.pos_embed, requested, args.img_sizes, dtypes, args.batch_sizes)
    if args.all:
        names = vispe.list_encodings(ndim=2, exclude=["learned", *vispe.list_encodings(kind="positions")])
        names.append("irpe.ctx_product_50_shared_qkv")  # with values, which need the attention weights
        cases = product(names, models[:1], (224,), dtypes[:1], (1, 8))
    for spec, (arch, patch), size, dtype, batch in cases:
        key = (spec, f"ViT-S/{patch}", size, batch, str(dtype).removeprefix("torch."))
        if key not in rows:
            result = measure(spec, arch, size, batch, dtype, args.rounds)
            rows[key] = {**dict(zip(KEYS, key, strict=True)), **result}
            if not args.all and size in TARGETS:
                rows[key]["target"] = TARGETS[size]
            args.out.write_text(
                json.dumps({"environment": environment(), "rows": list(rows.values())}, indent=1) + "\n"
            )
        print(*(f"{k}={v}" for k, v in rows[key].items()), flush=True)


@torch.inference_mode()
def measure(spec: str, arch: str, size: int, batch: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    stock = timm.create_model(arch, img_size=size, num_classes=0).eval()
    ours = timm.create_model(arch, img_size=size, num_classes=0, pos_embed=spec).eval()
    ours.load_state_dict(stock.state_dict(), strict=spec != "none")  # timm's own none has no table to load
    stock, ours = stock.to(dtype), ours.to(dtype)
    image = torch.randn(batch, 3, size, size, dtype=dtype)
    if size < 300 and batch == 1:  # a short forward: more pairs, for the same time
        rounds *= 6
    elif size > 300 and batch > 1:
        rounds = max(5, rounds // 4)
    result = compare(lambda: stock(image), lambda: ours(image), rounds)
    if result["relative_speed"] < SLOW:
        result["profile"] = {"stock": profile(stock, image), "encoded": profile(ours, image)}
    return result


def profile(model: torch.nn.Module, image: torch.Tensor) -> dict[str, float]:
    """Return milliseconds per forward of the six operators that take most."""
    with torch.profiler.profile() as prof:
        for _ in range(3):
            model(image)
    events = sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)[:6]
    return {e.key: round(e.self_cpu_time_total / 3000, 2) for e in events}


if __name__ == "__main__":
    print(f"vispe {vispe.__version__}")
    main()
