"""A faster interpreter: what Triton's does anew in every call, and what it computes to throw away.

It exchanges the functions of `triton.language` in every call of a helper, checks sums and products of whole numbers
for overflow (only in debug mode does it say what it found), and makes numpy dtypes that it has made before.

    TRITON_INTERPRET=1 python -m tests.triton.interpreter PROGRAM [ARGUMENTS]      (run a program with it)
"""

import runpy
import sys
from pathlib import Path

import pytest


def make_faster(patch):
    """Patch Triton's interpreter until `patch` is undone."""
    from triton.runtime import interpreter

    patch.setattr(interpreter, "_patch_lang", exchanged_once(interpreter))
    patch.setattr(interpreter, "_get_np_dtype", kept_by_name(interpreter._get_np_dtype))
    if not interpreter.interpreter_builder.options.debug:
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)


def exchanged_once(interpreter):
    """Return an exchange of functions that is made once per module and lasts until the launch ends."""
    exchange, launch, modules = interpreter._patch_lang, interpreter._LangPatchScope(), set()

    def once(function):
        nonlocal launch
        module = id(function.__globals__)
        if not launch._changes:  # it has ended
            modules.clear()
            modules.add(module)
            launch = exchange(function)
            return launch
        if module in modules:
            return interpreter._LangPatchScope()
        modules.add(module)
        return exchange(function)

    return once


def kept_by_name(function):
    """Return a function of a type that keeps what it returned."""
    kept = {}

    def read(type_):
        if type_.name not in kept:
            kept[type_.name] = function(type_)
        return kept[type_.name]

    return read


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as if the program had been started alone
    with pytest.MonkeyPatch.context() as patch:
        make_faster(patch)
        runpy.run_path(sys.argv[0], run_name="__main__")
