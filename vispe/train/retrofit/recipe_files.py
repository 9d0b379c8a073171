"""Recipes (YAML configs): lookup of those shipped with vispe by name, and permissions of foreign ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vispe.backbones.hub import code_named_by, downloads, downloads_granted
from vispe.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[2]
_LARGEST, _DEEPEST = 1 << 20, 30  # largest size of a recipe in bytes, and depth of nesting
CODE, DOWNLOAD = "--allow-code", "--allow-download"
"""Options of every command with recipes: permit a recipe to run Python code, or to download weights."""
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in the installed package, in a checkout


def recipe_file(name: str) -> str:
    """Return the path of a recipe: `name` if such a file exists, otherwise the shipped recipe of this name.

    Names with folders, and unknown names, are returned unchanged.

    >>> Path(recipe_file("tiny_smoke.yaml")).is_absolute(), recipe_file("mine/tiny_smoke.yaml")
    (True, 'mine/tiny_smoke.yaml')
    """
    if Path(name).exists() or Path(name).name != name:
        return name
    return next((str(folder / name) for folder in _FOLDERS if (folder / name).is_file()), name)


def resolve_recipes(words: Sequence[str]) -> list[str]:
    """Return command-line arguments with the recipes of `--config` replaced by their paths."""
    words = list(words)
    for k, word in enumerate(words):
        if k and words[k - 1] == "--config":
            words[k] = recipe_file(word)
        elif word.startswith("--config="):
            words[k] = f"--config={recipe_file(word.removeprefix('--config='))}"
    return words


def task_arguments(words: Sequence[str]) -> list[str]:
    """Return arguments for a parser of a task: paths of recipes, and options with dashes as names of fields.

    >>> task_arguments(["--batch-size", "2", "--val-every=3"])
    ['--batch_size', '2', '--val_every=3']
    """
    words = resolve_recipes(words)
    for k, word in enumerate(words):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            words[k] = f"--{option[2:].replace('-', '_')}{equals}{value}"
    return words


@contextmanager
def recipe_permissions(words: Sequence[str]) -> Iterator[list[str]]:
    """Check the recipes of a command line, and apply its permissions within the context.

    Recipes of vispe, and command lines without a recipe, may run Python code and download weights. Other recipes need
    `--allow-code` and `--allow-download`.

    Args:
        words: command-line arguments.

    Yields:
        The arguments with the paths of recipes, without the two options.

    Raises:
        InputError: a recipe is too large, too deeply nested, or has aliases.
    """
    rest = resolve_recipes([word for word in words if word not in (CODE, DOWNLOAD)])
    files = [Path(value) for value in _values(rest) if value.lower().endswith((".yaml", ".yml", ".json"))]
    files += [Path(value) for value in _values(rest, "--config")]
    for file in dict.fromkeys(files):
        if file.is_file():
            _check_recipe(file)
    foreign = [
        value for value in _values(rest, "--config") if Path(value).resolve().parent not in _own_folders()
    ]
    download_allowed = DOWNLOAD in words
    with (
        code_named_by(rest if foreign and CODE not in words else None),
        downloads(download_allowed or not foreign),
        downloads_granted(download_allowed),
    ):
        yield rest


def _own_folders() -> list[Path]:
    return [folder.resolve() for folder in _FOLDERS]


def _values(words: Sequence[str], option: str = "--") -> list[str]:
    """Return the values of an option, from the next argument or after '='; by default those of all options."""
    values = []
    for k, word in enumerate(words):
        name, equals, value = word.partition("=")
        matches = name.startswith("--") if option == "--" else name == option
        if matches and equals:
            values.append(value)
        elif matches and k + 1 < len(words):
            values.append(words[k + 1])
    return values


def _check_recipe(file: Path) -> None:
    """Check the structure of a YAML file before it is parsed into objects.

    Raises:
        InputError: the file is too large or too deeply nested, or has aliases, which can expand
            exponentially.
    """
    import yaml

    size = file.stat().st_size
    if size > _LARGEST:
        raise InputError(
            f"{file}: recipes must have at most {_LARGEST} bytes, got {size}. Write a shorter one."
        )
    depth = 0
    try:
        with file.open(encoding="utf-8") as stream:
            for event in yaml.parse(stream, Loader=yaml.SafeLoader):
                if isinstance(event, yaml.AliasEvent):
                    line = event.start_mark.line + 1
                    raise InputError(
                        f"{file}: aliases are not allowed, got *{event.anchor} in line {line}. Write out the value."
                    )
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                if depth > _DEEPEST:
                    raise InputError(
                        f"{file}: recipes must have at most {_DEEPEST} levels of nesting. Write a flatter one."
                    )
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not readable YAML ({' '.join(str(error).split())[:200]}).") from error
