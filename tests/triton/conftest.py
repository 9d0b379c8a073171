"""A faster interpreter: Triton's exchanges the functions of `triton.language` anew in every call of a helper."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _exchanged_once():
    """One exchange per module lasts until the launch ends."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
