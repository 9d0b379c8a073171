"""The recipes that come with vispe, found by name alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # of the installed package, of a checkout


def recipe_file(name: str) -> str:
    """Return the path of a recipe: `name` as it is if such a file exists, else that of the recipe of this name.

    A name with folders in it, and one that is of no recipe, is returned as it is.
    """
    if Path(name).exists() or Path(name).name != name:
        return name
    return next((str(folder / name) for folder in _FOLDERS if (folder / name).is_file()), name)


def with_recipes(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with the paths of recipes that `--config` names."""
    found = list(words)
    for k, word in enumerate(found):
        if k and found[k - 1] == "--config":
            found[k] = recipe_file(word)
        elif word.startswith("--config="):
            found[k] = f"--config={recipe_file(word.partition('=')[2])}"
    return found
