"""Train a small ViT on one grid with each encoding, and evaluate it on other grids.

    python eval/extrapolation.py [--encodings alibi2d rope_axial ...] [--seeds 3] [--num-workers 2]

Writes eval/results/extrapolation.json after every model, and resumes after an interruption. The task is that of
`vispe.experimental.measures.extrapolation`. `python eval/figures.py` plots the result.
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
    parser.add_argument("--encodings", nargs="+", default=[*MEMBERS, *PRESETS, *SAMPLED])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=2, help="models trained at once, one core each")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    recipe = asdict(ExtrapolationRecipe())
    previous = json.loads(args.out.read_text()) if args.out.exists() else {"rows": [], "recipe": None}
    if previous["rows"] and previous["recipe"] != json.loads(json.dumps(recipe)):
        parser.error(
            f"{args.out} was made with {previous['recipe']}, the recipe is now {recipe}; move the file."
        )
    rows = previous["rows"]
    done = {(r["encoding"], r["seed"]) for r in rows}
    jobs = [(e, s) for s in range(args.seeds) for e in args.encodings if (e, s) not in done]
    args.out.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(args.num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(run, *job) for job in jobs]):
            rows.append(future.result())
            rows.sort(key=lambda r: (r["encoding"], r["seed"]))
            made = {"environment": environment(), "recipe": recipe, "shapes": SHAPES, "rows": rows}
            part = args.out.with_suffix(".part")
            part.write_text(json.dumps(made, indent=1) + "\n")
            part.replace(args.out)
            print(json.dumps(future.result()), flush=True)


def run(encoding: str, seed: int) -> dict[str, Any]:
    """Return one row: accuracy per question and grid of one model, and its CPU seconds."""
    start = time.process_time()
    model = train(encoding, seed)
    seconds = round(time.process_time() - start, 1)
    result = {
        name: {q: round(a, 4) for q, a in score(model, shape).items()} for name, shape in SHAPES.items()
    }
    return {"encoding": encoding, "seed": seed, "accuracy": result, "cpu_s": seconds}


if __name__ == "__main__":
    main()
