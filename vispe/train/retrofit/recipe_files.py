"""Recipes: those that come with vispe, by name, and what a recipe from elsewhere may do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vispe.backbones.hub import code_named_by, downloads, downloads_granted
from vispe.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[2]
_LARGEST, _DEEPEST = 1 << 20, 30  # bytes of a recipe, and levels of nesting
CODE, DOWNLOAD = "--allow-code", "--allow-download"
"""Options of every command that reads a recipe: what it names may be run, or fetched."""
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


@contextmanager
def as_permitted(words: Sequence[str]) -> Iterator[list[str]]:
    """Check the recipes that a command line names; inside, they may do what the command line allows.

    A recipe of vispe, and a command line without a recipe, may run the Python code and fetch the weights that they
    name. Any other recipe needs `--allow-code` and `--allow-download`.

    Args:
        words: of a command line.

    Yields:
        The words with the paths of recipes, without the two options.

    Raises:
        InputError: a recipe that is too large, too deep, or has aliases.
    """
    rest = with_recipes([word for word in words if word not in (CODE, DOWNLOAD)])
    files = [Path(value) for value in _values(rest) if value.lower().endswith((".yaml", ".yml", ".json"))]
    files += [Path(value) for value in _values(rest, "--config")]
    for file in dict.fromkeys(files):
        if file.is_file():
            _check_recipe(file)
    foreign = [
        value for value in _values(rest, "--config") if Path(value).resolve().parent not in _own_folders()
    ]
    granted = DOWNLOAD in words
    with (
        code_named_by(rest if foreign and CODE not in words else None),
        downloads(granted or not foreign),
        downloads_granted(granted),
    ):
        yield rest


def _own_folders() -> list[Path]:
    return [folder.resolve() for folder in _FOLDERS]


def _values(words: Sequence[str], option: str = "--") -> list[str]:
    """Return the values of an option, in the next word or after '='; of all options by default."""
    found = []
    for k, word in enumerate(words):
        name, equals, value = word.partition("=")
        matches = name.startswith("--") if option == "--" else name == option
        if matches and equals:
            found.append(value)
        elif matches and k + 1 < len(words):
            found.append(words[k + 1])
    return found


def _check_recipe(file: Path) -> None:
    """Check the structure of a YAML file before any part of it is built.

    Raises:
        InputError: it is too large or too deep, or has aliases, which a few bytes multiply without limit.
    """
    import yaml

    size = file.stat().st_size
    if size > _LARGEST:
        raise InputError(
            f"{file} has {size} bytes, and a recipe has at most {_LARGEST}; write a shorter one."
        )
    depth = 0
    try:
        with file.open(encoding="utf-8") as stream:
            for event in yaml.parse(stream, Loader=yaml.SafeLoader):
                if isinstance(event, yaml.AliasEvent):
                    line = event.start_mark.line + 1
                    raise InputError(
                        f"{file} has the alias *{event.anchor} in line {line}; write the value out."
                    )
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                if depth > _DEEPEST:
                    raise InputError(
                        f"{file} has more than {_DEEPEST} levels of nesting; write a flatter recipe."
                    )
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not readable YAML ({' '.join(str(error).split())[:200]}).") from error
