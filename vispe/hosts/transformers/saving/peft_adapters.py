"""Patches of peft for converted models: adapter files, target modules, and caches of prefix tuning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from vispe.hosts.monkeypatch import Patch
from vispe.hosts.transformers.language.positions.kv_cache import PREFIX
from vispe.hosts.transformers.saving import adapter_targets, config_record


def install() -> None:
    """Wrap functions of peft; repeated calls have no effect."""
    for patch in _patches():
        patch.install()


def uninstall() -> None:
    """Remove the patches."""
    for patch in _patches():
        patch.uninstall()


def _patches() -> list[Patch]:
    owner = importlib.import_module("peft.peft_model").PeftModel
    return [
        Patch(owner, "save_pretrained", _saving),
        Patch(owner, "get_prompt", _prompting),
        *adapter_targets.patches(),
    ]


def virtual_tokens(model: Any) -> int:
    """Return the number of virtual tokens that peft puts in front of the prompt during generation with a model."""
    # during generation, peft patches this method of the model with that of the adapter
    method = vars(model).get("prepare_inputs_for_generation")
    config = getattr(getattr(method, "__self__", None), "active_peft_config", None)
    return int(config.num_virtual_tokens) if getattr(config, "is_prompt_learning", False) else 0


def _prompting(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        prompt = original(self, *args, **kwargs)
        if hasattr(prompt, "get_seq_length"):  # a cache of prefix tuning; prompt tuning returns embeddings
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
