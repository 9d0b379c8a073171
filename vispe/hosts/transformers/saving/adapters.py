"""Adapters of peft, once vispe is imported: whoever saves some for a converted model is told what they belong to."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from vispe.hosts.transformers.saving import record


def install() -> None:
    """Wrap `PeftModel.save_pretrained`; once is enough, more often does no harm."""
    base = _base()
    if not hasattr(base.save_pretrained, "vispe_original"):
        base.save_pretrained = _saving(base.save_pretrained)


def uninstall() -> None:
    """Take the wrapper away again."""
    base = _base()
    base.save_pretrained = getattr(base.save_pretrained, "vispe_original", base.save_pretrained)


def _base() -> type[Any]:
    return importlib.import_module("peft.peft_model").PeftModel


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        if configs := record.write(self):
            what = " and ".join(record.shown(record.read(config)) for config in configs)
            warnings.warn(
                f"An adapter is saved without its base model, which has {what}; load that with vispe.from_pretrained, "
                "or convert it in the same way, before the adapter.",
                UserWarning,
                stacklevel=2,
            )
        original(self, *args, **kwargs)

    save_pretrained.vispe_original = original
    return save_pretrained
