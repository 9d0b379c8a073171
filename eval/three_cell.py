"""Train a small ViT on the three-cell benchmark with every two-axis encoding, and plot the table.

    python eval/three_cell.py [--encodings alibi2d rope_axial ...] [--seeds 3] [--num-workers 2]

Writes eval/results/three_cell.json after every run, resumes after an interruption, also within a run, and then plots
eval/results/three_cell.png. `--draw` only plots.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)

import vispe
from vispe.experimental.three_cell.results import read_rows, run_missing
from vispe.experimental.three_cell.summary import ThreeCellTable, plot_table

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from timing import environment

OUT = Path(__file__).parent / "results" / "three_cell.json"
MEMBERS = vispe.list_encodings(ndim=2, exclude=vispe.list_encodings(kind="positions"))
PRESETS = ("alibi2d.geometric", "alibi2d.local(slopes=geometric)", "peg.cpvt", "rope_axial+rpb")


def main() -> None:
    """Run what is missing, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encodings", nargs="+", default=[*MEMBERS, *PRESETS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=2, help="models trained at once, one core each")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    args.out.parent.mkdir(exist_ok=True)
    if not args.draw:
        also = {"environment": environment()}
        seeds = range(args.seeds)
        for row in run_missing(args.encodings, seeds, file=args.out, num_workers=args.num_workers, also=also):
            print(json.dumps(row), flush=True)
    rows = read_rows(args.out)
    print(ThreeCellTable(rows).to_markdown())
    plot_table(rows).savefig(args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
