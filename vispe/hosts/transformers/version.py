"""The oldest transformers that vispe works with, and what versions call the same thing.

In 5.16 the language models of Qwen2-VL and Qwen2.5-VL take their position ids in another form; from 5.17 on all
families take the one that `vispe.hosts.transformers.language.converted_classes` hands them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vispe.errors import MissingExtra

OLDEST = "5.17.0"
CACHE_NAMES = ("cache", "past_key_values")
"""The argument and the output with keys and values of what came before: from 5.24 on, and until then."""


def check_version() -> None:
    """Raise `MissingExtra` where the transformers that is installed is too old, before anything is changed."""
    import transformers

    if release(transformers.__version__) < release(OLDEST):
        raise MissingExtra(
            f"vispe needs transformers {OLDEST} or later, and {transformers.__version__} is installed; run: "
            "pip install -U 'vispe[vlm]'"
        )


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (5, 17, 0) of ``'5.17.0.dev0'``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among arguments, under whichever name; None where there is none."""
    for name in CACHE_NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None
