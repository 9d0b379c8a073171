"""A faster interpreter of Triton, without its repeated and unused computations.

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

    patch.setattr(interpreter, "_patch_lang", patched_once(interpreter))
    patch.setattr(interpreter, "_get_np_dtype", cached_by_name(interpreter._get_np_dtype))
    core = interpreter.tl.core
    patch.setattr(core.block_type, "__init__", shaped_once(core))
    patch.setattr(core.tensor, "__init__", tensor_of_shape(core))
    if not interpreter.interpreter_builder.options.debug:
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)


def patched_once(interpreter):
    """Return a patch of functions that is applied once per module until the launch ends."""
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


def cached_by_name(function):
    """Return a function of a type with cached results."""
    cached = {}

    def read(type_):
        if type_.name not in cached:
            cached[type_.name] = function(type_)
        return cached[type_.name]

    return read


def shaped_once(core):
    """Return a constructor of block types that checks, counts and names each shape of integers once."""
    check, cached = core.block_type.__init__, {}

    def construct(self, element_ty, shape):
        sizes = (*shape,)
        all_integers = all(type(size) is int for size in sizes)
        if not all_integers or sizes not in cached:
            check(self, element_ty, shape)
            if all_integers:
                cached[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = cached[sizes]
        self.name = f"<{text}, {element_ty}>"

    return construct


def tensor_of_shape(core):
    """Return a constructor of tensors that wraps each shape and its number of elements once."""
    cached = {}

    def construct(self, handle, type):
        sizes = (*type.shape,) if type.is_block() else ()
        if sizes not in cached:
            numel = core.constexpr(math.prod(sizes))
            cached[sizes] = core.tuple([core.constexpr(size) for size in sizes]), numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = cached[sizes]

    return construct


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as if the program had been started alone
    with pytest.MonkeyPatch.context() as patch:
        make_faster(patch)
        runpy.run_path(sys.argv[0], run_name="__main__")
