"""Target modules of peft adapters: names of host layers are prevented from selecting layers inside encodings.

peft selects modules by the ends of their names. An encoding may have a linear map with the name of a host
layer (the `out_proj` of `seqpe` in CLIP). No adapter can wrap this map, as it is not a `torch.nn.Linear`.
Names that occur only in an encoding are passed to peft, which rejects them.
"""

from __future__ import annotations

import contextvars
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from vispe.encodings.base import Encoding
from vispe.hosts.contracts.check import check_contract
from vispe.hosts.monkeypatch import Patch
from vispe.hosts.transformers.subclasses import stock_of

_CHECK = "check_target_module_exists"
_UTILS = "peft.tuners.tuners_utils"
# names of the modules inside and outside of the encodings of the model that adapters are being put into
_modules: contextvars.ContextVar[tuple[set[str], list[str]] | None] = contextvars.ContextVar(
    "modules", default=None
)


def patches() -> list[Patch]:
    """Return the functions of peft that are wrapped; several modules of peft import the same function by name."""
    users = [m for name, m in sys.modules.items() if name.startswith("peft.tuners.") and _CHECK in vars(m)]
    tuner = importlib.import_module(_UTILS).BaseTuner
    return [Patch(tuner, "inject_adapter", _injecting), *(Patch(user, _CHECK, _checking) for user in users)]


def _injecting(original: Callable[..., Any]) -> Callable[..., Any]:
    def inject_adapter(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(m, Encoding) or stock_of(type(m)) for m in model.modules()):
            check_contract("peft")
        token = _modules.set(_split(model))
        try:
            return original(self, model, *args, **kwargs)
        finally:
            _modules.reset(token)

    return inject_adapter


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_target_module_exists(config: Any, key: str) -> Any:
        result = original(config, key)
        inside, outside = _modules.get() or ((), ())
        if not result or key not in inside:
            return result
        return False if _selects_host(config.target_modules, key, outside) else result

    return check_target_module_exists


def _split(model: nn.Module) -> tuple[set[str], list[str]]:
    """Return the names of modules inside encodings, and of all others."""
    roots = [name for name, module in model.named_modules() if isinstance(module, Encoding)]
    if not roots:
        return set(), []
    prefixes = tuple(f"{root}." for root in roots if root)
    names = [name for name, _ in model.named_modules()]
    inside = {name for name in names if name in roots or name.startswith(prefixes)}
    return inside, [name for name in names if name not in inside]


def _selects_host(targets: Any, key: str, outside: list[str]) -> bool:
    """Whether every target that matches a module of an encoding, other than by its full name, matches the host, too."""
    if isinstance(targets, str):
        return any(re.fullmatch(targets, name) for name in outside)
    if not targets or key in targets:
        return False
    ends = [target for target in targets if key.endswith(f".{target}")]
    return all(any(name == end or name.endswith(f".{end}") for name in outside) for end in ends)
