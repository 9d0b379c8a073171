"""Adapters of peft, once vispe is imported: their files, their target modules, and the caches of prefix tuning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from vispe.hosts.monkeypatch import Door
from vispe.hosts.transformers.language.kv_cache import PREFIX
from vispe.hosts.transformers.saving import adapter_targets, config_record


def install() -> None:
    """Wrap functions of peft; calling it again has no effect."""
    for door in _doors():
        door.install()


def uninstall() -> None:
    """Take the wrappers away again."""
    for door in _doors():
        door.uninstall()


def _doors() -> list[Door]:
    owner = importlib.import_module("peft.peft_model").PeftModel
    return [
        Door(owner, "save_pretrained", _saving),
        Door(owner, "get_prompt", _prompting),
        *adapter_targets.doors(),
    ]


def virtual_tokens(model: Any) -> int:
    """Return how many tokens peft puts in front of the prompt while it generates with a model."""
    method = vars(model).get(
        "prepare_inputs_for_generation"
    )  # of the adapter, which peft puts there meanwhile
    config = getattr(getattr(method, "__self__", None), "active_peft_config", None)
    return int(config.num_virtual_tokens) if getattr(config, "is_prompt_learning", False) else 0


def _prompting(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        prompt = original(self, *args, **kwargs)
        if hasattr(prompt, "get_seq_length"):  # a cache; prompt tuning gives embeddings
            setattr(prompt, PREFIX, True)
        return prompt

    return get_prompt


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        with config_record.exact(self) as configs:
            if configs:
                names = " and ".join(config_record.shown(config_record.read(config)) for config in configs)
                warnings.warn(
                    f"An adapter is saved without its base model, which has {names}; load that with "
                    "vispe.from_pretrained, or convert it in the same way, before the adapter.",
                    UserWarning,
                    stacklevel=2,
                )
            original(self, *args, **kwargs)

    return save_pretrained
