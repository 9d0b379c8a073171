"""Train a small ViT on one grid with each encoding, and evaluate it on other grids.

    python eval/extrapolation.py [--encodings alibi2d rope_axial ...] [--seeds 3] [--num-workers 2]
    python eval/extrapolation.py --large

Writes eval/results/extrapolation.json after every model, and resumes after an interruption. The task is that of
`vispe.experimental.measures.extrapolation`. `python eval/figures.py` plots the result. With `--large`, a model with
five times the weights is trained with FIRE and with a rotary embedding on 7 x 7 patches and evaluated on up to 32 x 32,
the 4.57 times of TMLR 9150 (OpenReview mEGr7Fm54B), into eval/results/extrapolation_large.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import torch

import vispe
from vispe.experimental.measures.extrapolation import ExtrapolationRecipe, score, train

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from timing import environment

OUT = Path(__file__).parent / "results" / "extrapolation.json"
SHAPES = {"0.5x": (3, 3), "1x": (6, 6), "1.5x": (9, 9), "2x": (12, 12), "wide": (6, 12), "tall": (9, 5)}
LARGE = ExtrapolationRecipe(shape=(7, 7), steps=500, lr=1.5e-3, dim=128, depth=4)
LARGE_SHAPES = {"1x": (7, 7), "2x": (14, 14), "3x": (21, 21), "4.57x": (32, 32)}
MEMBERS = vispe.list_encodings(ndim=2, exclude=vispe.list_encodings(kind="positions"))
# training positions cover those of the largest grid; rotations and distances are invariant to shifts
SAMPLERS = (
    "randomized(reach=12)",
    "rfs(reach=12)",
    "increments",
    "shift(reach=12)",
    "gaps(rate=0.3)",
    "segments(canvas=12)",
    "jitter",
    "stretch",
)
SAMPLED = [
    f"{sampler}+{base}"
    for base in ("sincos2d", "fourier", "rope_axial", "alibi2d.geometric")
    for sampler in SAMPLERS
    if not sampler.startswith("shift") or base in ("sincos2d", "fourier")
]
PRESETS = ("alibi2d.geometric", "alibi2d.local(slopes=geometric)", "peg.cpvt", "rope_axial+rpb")


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encodings", nargs="+")
    parser.add_argument(
        "--large", action="store_true", help="a larger model, and grids up to 4.57 times larger"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=2, help="models trained at once, one core each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen, shapes = (LARGE, LARGE_SHAPES) if args.large else (ExtrapolationRecipe(), SHAPES)
    encodings = args.encodings or (["fire", "rope_axial"] if args.large else [*MEMBERS, *PRESETS, *SAMPLED])
    out = args.out or (OUT.with_stem("extrapolation_large") if args.large else OUT)
    recipe = asdict(chosen)
    previous = json.loads(out.read_text()) if out.exists() else {"rows": [], "recipe": None}
    if previous["rows"] and previous["recipe"] != json.loads(json.dumps(recipe)):
        parser.error(f"{out} was made with {previous['recipe']}, the recipe is now {recipe}; move the file.")
    rows = previous["rows"]
    done = {(r["encoding"], r["seed"]) for r in rows}
    jobs = [(e, s) for s in range(args.seeds) for e in encodings if (e, s) not in done]
    out.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(args.num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(run, *job, chosen, shapes) for job in jobs]):
            rows.append(future.result())
            rows.sort(key=lambda r: (r["encoding"], r["seed"]))
            report = {"environment": environment(), "recipe": recipe, "shapes": shapes, "rows": rows}
            partial_file = out.with_suffix(".part")
            partial_file.write_text(json.dumps(report, indent=1) + "\n")
            partial_file.replace(out)
            print(json.dumps(future.result()), flush=True)


def run(
    encoding: str, seed: int, recipe: ExtrapolationRecipe, shapes: dict[str, tuple[int, int]]
) -> dict[str, Any]:
    """Return one row: accuracy per question and grid of one model, and its CPU seconds."""
    start = time.process_time()
    model = train(encoding, seed, recipe)
    seconds = round(time.process_time() - start, 1)
    # smaller batches on the largest grid, whose dense biases have a million entries per scene and head
    limits = {name: {} if h * w <= 144 else {"batch_size": 8, "count": 64} for name, (h, w) in shapes.items()}
    result = {
        name: {q: round(a, 4) for q, a in score(model, shape, **limits[name]).items()}
        for name, shape in shapes.items()
    }
    return {"encoding": encoding, "seed": seed, "accuracy": result, "cpu_s": seconds}


if __name__ == "__main__":
    main()
