"""`python -m tests.golden DIR [--json FILE] [-k PATTERN]`: one line per case, exit 1 on any failure."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path

from tests.golden.runner import run_case


def main() -> int:
    """Run the cases of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("dir", type=Path, help="folder with .npz cases")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("-k", default="*", metavar="PATTERN", help="run cases whose name matches (wildcards)")
    args = parser.parse_args()
    if not args.dir.is_dir():
        parser.error(f"there is no folder {args.dir}")
    pattern = args.k if any(c in args.k for c in "*?[") else f"*{args.k}*"
    paths = [p for p in sorted(args.dir.glob("*.npz")) if fnmatch.fnmatch(p.stem, pattern)]
    results = []
    for path in paths:
        results.append(run_case(path))
        print(results[-1], flush=True)  # noqa: T201  the report is what this program is for
    if args.json:
        args.json.write_text(json.dumps([r.to_dict() for r in results], indent=1) + "\n")
    passed, failed = (sum(r.status == s for r in results) for s in ("PASS", "FAIL"))
    print(f"{passed} passed, {failed} failed")  # noqa: T201
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
