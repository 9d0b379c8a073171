"""A faster interpreter: what Triton's does again in every call, and what it computes to throw away.

It exchanges the functions of `triton.language` in every call of a helper, checks sums and products of integers
for overflow (it reports them only in debug mode), and makes numpy dtypes and shapes that it has made before.

    TRITON_INTERPRET=1 python -m tests.attention.triton.interpreter PROGRAM [ARGUMENTS]      (run a program with it)
"""

import math
import runpy
import sys
from pathlib import Path

import pytest


def make_faster(patch):
    """Patch Triton's interpreter until `patch` is undone."""
    from triton.runtime import interpreter

    patch.setattr(interpreter, "_patch_lang", exchanged_once(interpreter))
    patch.setattr(interpreter, "_get_np_dtype", kept_by_name(interpreter._get_np_dtype))
    core = interpreter.tl.core
    patch.setattr(core.block_type, "__init__", shaped_once(core))
    patch.setattr(core.tensor, "__init__", tensor_of_shape(core))
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
    retained = {}

    def read(type_):
        if type_.name not in retained:
            retained[type_.name] = function(type_)
        return retained[type_.name]

    return read


def shaped_once(core):
    """Return a constructor of block types that checks, counts and names each shape of integers once."""
    check, retained = core.block_type.__init__, {}

    def construct(self, element_ty, shape):
        sizes = (*shape,)
        whole = all(type(size) is int for size in sizes)
        if not whole or sizes not in retained:
            check(self, element_ty, shape)
            if whole:
                retained[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = retained[sizes]
        self.name = f"<{text}, {element_ty}>"

    return construct


def tensor_of_shape(core):
    """Return a constructor of tensors that wraps each shape and its number of elements once."""
    retained = {}

    def construct(self, handle, type):
        sizes = (*type.shape,) if type.is_block() else ()
        if sizes not in retained:
            numel = core.constexpr(math.prod(sizes))
            retained[sizes] = core.tuple([core.constexpr(size) for size in sizes]), numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = retained[sizes]

    return construct


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as if the program had been started alone
    with pytest.MonkeyPatch.context() as patch:
        make_faster(patch)
        runpy.run_path(sys.argv[0], run_name="__main__")
