"""``python -m vispe.run SCRIPT ARGS...``: run a script with vispe imported first.

Stock timm scripts then accept ``--model-kwargs pos_embed=alibi2d``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import vispe


def main() -> None:
    """Run the script that the command line names, as `__main__`, with its own arguments."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(f"vispe {vispe.__version__}\nusage: python -m vispe.run SCRIPT ARGS...")
    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"vispe.run: there is no script {script}; give the path of a Python file.")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
