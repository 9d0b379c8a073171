"""Programs of others with vispe switched on: ``python -m vispe.run SCRIPT ARGS...``, or a module with ``-m``.

Stock timm scripts then accept ``--model-kwargs pos_embed=alibi2d``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import vispe


def main() -> None:
    """Run the script or module that the command line names, as `__main__`, with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m vispe.run",
        usage="%(prog)s [-h] (SCRIPT | -m MODULE) ...",
        description=f"Run a script or a module with vispe {vispe.__version__} imported first.",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as of python -m")
    parser.add_argument("script", help="path of a Python file, or with -m the name of a module or package")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    asked = parser.parse_args()
    sys.argv = [asked.script, *asked.args]
    if asked.module:
        if not _runs(asked.script):
            parser.error(
                f"there is no module {asked.script} that can be run; give the name of one that `python -m` runs."
            )
        runpy.run_module(asked.script, run_name="__main__", alter_sys=True)
        return
    script = Path(asked.script)
    if not script.is_file():
        parser.error(
            f"there is no script {script}; give the path of a Python file, or -m and the name of a module."
        )
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _runs(module: str) -> bool:
    """Whether a module is found, and a package has a `__main__`."""
    try:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
    except (ImportError, ValueError):  # a package above it is missing, or this is no name of a module
        return False
    return spec is not None


if __name__ == "__main__":
    main()
