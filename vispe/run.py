"""``python -m vispe.run SCRIPT ARGS...``: run a script with vispe imported first.

Stock timm scripts then accept ``--model-kwargs pos_embed=alibi2d``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import vispe


def main() -> None:
    """Run the script that the command line names, as `__main__`, with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m vispe.run", description=f"Run a script with vispe {vispe.__version__} imported first."
    )
    parser.add_argument("script", type=Path, help="path of a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    asked = parser.parse_args()
    if not asked.script.is_file():
        parser.error(f"there is no script {asked.script}; give the path of a Python file.")
    sys.argv = [str(asked.script), *asked.args]
    if not sys.flags.safe_path:
        sys.path[0] = str(asked.script.resolve().parent)
    runpy.run_path(str(asked.script), run_name="__main__")


if __name__ == "__main__":
    main()
