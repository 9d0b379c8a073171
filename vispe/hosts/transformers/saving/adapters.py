"""Adapters of peft, once vispe is imported: saving some for a converted model warns of what they belong to."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from vispe.hosts.doors import Door
from vispe.hosts.transformers.saving import record


def install() -> None:
    """Wrap `PeftModel.save_pretrained`; once is enough, more often does no harm."""
    _door().install()


def uninstall() -> None:
    """Take the wrapper away again."""
    _door().uninstall()


def _door() -> Door:
    return Door(importlib.import_module("peft.peft_model").PeftModel, "save_pretrained", _saving)


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        if configs := record.write(self):
            names = " and ".join(record.shown(record.read(config)) for config in configs)
            warnings.warn(
                f"An adapter is saved without its base model, which has {names}; load that with vispe.from_pretrained, "
                "or convert it in the same way, before the adapter.",
                UserWarning,
                stacklevel=2,
            )
        original(self, *args, **kwargs)

    return save_pretrained
