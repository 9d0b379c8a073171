"""Oldest supported version of transformers, and argument names that differ between versions.

In 5.16 the language models of Qwen2-VL and Qwen2.5-VL expect position ids in another form. From 5.17 on, all
families accept the form passed by `vispe.hosts.transformers.language.converted_classes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vispe.errors import MissingExtra
from vispe.hosts.contracts.contract import release

OLDEST = "5.17.0"
CHUNKED_IMAGES = "5.23.0"
"""Oldest version whose `generate` encodes the images of a prompt that is processed in chunks; older ones drop them."""
CACHE_NAMES = ("cache", "past_key_values")
"""Names of the KV cache as argument and output: from 5.24 on, and in older versions."""


def check_version(oldest: str = OLDEST, owner: str = "vispe") -> None:
    """Raise `MissingExtra` if the installed version of transformers is too old."""
    import transformers

    if release(transformers.__version__) < release(oldest):
        raise MissingExtra(
            f"{owner} needs transformers {oldest} or later, got {transformers.__version__}. Run: "
            "pip install -U 'vispe[vlm]'"
        )


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache among keyword arguments, under either name, or None."""
    for name in CACHE_NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None
