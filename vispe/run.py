"""Launcher of scripts with vispe imported first: ``python -m vispe.run [-m] SCRIPT ARGS...``.

For example, unmodified timm scripts then accept ``--model-kwargs pos_embed=alibi2d``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import vispe


def main() -> None:
    """Run the script or module given on the command line as `__main__`, with its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m vispe.run",
        usage="%(prog)s [-h] (SCRIPT | -m MODULE) ...",
        description=f"Run a script or a module with vispe {vispe.__version__} imported first.",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m"
    )
    parser.add_argument("script", help="path of a Python file, or with -m the name of a module or package")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script or module")
    options = parser.parse_args()
    sys.argv = [options.script, *options.args]
    if options.module:
        if not _is_runnable(options.script):
            parser.error(
                f"module {options.script} does not exist or cannot be run. Use a module that `python -m` can run."
            )
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    script = Path(options.script)
    if not script.is_file():
        parser.error(
            f"script {script} does not exist. Use the path of a Python file, or -m and the name of a module."
        )
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _is_runnable(module: str) -> bool:
    """Whether a module exists; for a package, whether it has a `__main__`."""
    try:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
    # a parent package is missing, or the name is invalid
    except (ImportError, ValueError):
        return False
    return spec is not None


if __name__ == "__main__":
    main()
