"""The recipes that come with vispe, found by name alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # of the installed package, of a checkout


def recipe_file(name: str) -> str:
    """Return the path of a recipe: `name` as it is if such a file exists, else that of the recipe of this name.

    A name with folders in it, and one that is of no recipe, is returned as it is.

    >>> Path(recipe_file("tiny_smoke.yaml")).is_absolute(), recipe_file("mine/tiny_smoke.yaml")
    (True, 'mine/tiny_smoke.yaml')
    """
    if Path(name).exists() or Path(name).name != name:
        return name
    return next((str(folder / name) for folder in _FOLDERS if (folder / name).is_file()), name)


def with_recipes(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with the paths of recipes that `--config` names."""
    words = list(words)
    for k, word in enumerate(words):
        if k and words[k - 1] == "--config":
            words[k] = recipe_file(word)
        elif word.startswith("--config="):
            words[k] = f"--config={recipe_file(word.removeprefix('--config='))}"
    return words
