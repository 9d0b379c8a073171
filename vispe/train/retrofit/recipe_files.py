"""Recipes (YAML configs): lookup of those shipped with vispe by name, and permissions of foreign ones."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from vispe.backbones.hub import code_named_by, downloads, downloads_granted
from vispe.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[2]
_LARGEST, _DEEPEST = 1 << 20, 30  # largest size of a recipe in bytes, and depth of nesting
CODE, DOWNLOAD = "--allow-code", "--allow-download"
"""Options of every command with recipes: permit a recipe to run Python code, or to download weights."""
_IMPORTS = ("class_path", "init_args", "dict_kwargs")  # keys of jsonargparse for classes
_SHOWN = 60  # characters of a value in messages
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


def task_arguments(words: Sequence[str], task: type) -> list[str]:
    """Return arguments for a parser of a task: paths of recipes, and options with dashes as names of fields.

    Raises:
        InputError: see `check_groups`.

    >>> task_arguments(["--batch-size", "2", "--val-every=3"], object)
    ['--batch_size', '2', '--val_every=3']
    """
    words = resolve_recipes(words)
    check_groups(words, typing.get_type_hints(task))
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
        InputError: a recipe is too large, too deeply nested, or has aliases, repeated keys or keys that import code.
    """
    rest = resolve_recipes([word for word in words if word not in (CODE, DOWNLOAD)])
    for value in _values(rest, "--config"):
        if Path(value).is_file():
            _check_recipe(Path(value))
    for value in _values(rest):
        if value.startswith(("{", "[")):
            _check_inline(value)
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


def configured_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the top-level entries of all recipes of a command line, the last one of each key."""
    import yaml

    files = [Path(value) for value in _values(words, "--config") if Path(value).is_file()]
    return {
        key: value for file in files for key, value in (yaml.safe_load(file.read_text("utf-8")) or {}).items()
    }


def check_groups(words: Sequence[str], hints: Mapping[str, Any]) -> None:
    """Check that recipes write out the groups of options of a command, and check files of single groups.

    The parser accepts the name of a class or of another file instead, and would import or read it unchecked.

    Args:
        words: command-line arguments with the paths of recipes.
        hints: type of each option; groups are dataclasses and lists of them.

    Raises:
        InputError: a group of a recipe is text, or the file of a group has an error of a recipe.
    """
    import yaml

    groups = {key for key, hint in hints.items() if any(map(is_dataclass, (hint, *typing.get_args(hint))))}
    for key in groups:
        for value in _values(words, f"--{key}"):
            if Path(value).is_file():
                _check_recipe(Path(value))
    for value in _values(words, "--config"):
        node = (
            yaml.compose(Path(value).read_text("utf-8"), yaml.SafeLoader) if Path(value).is_file() else None
        )
        for key, entry in node.value if isinstance(node, yaml.MappingNode) else ():
            entries = entry.value if isinstance(entry, yaml.SequenceNode) else [entry]
            for item in entries if key.value in groups else ():
                if isinstance(item, yaml.ScalarNode) and item.tag.endswith(":str"):
                    raise InputError(
                        f"{value}: {key.value} must be a mapping of its keys, got {item.value!r}."
                    )


def _check_recipe(file: Path) -> None:
    """Check the structure of a YAML file before it is parsed into objects.

    Raises:
        InputError: the file is too large or too deeply nested, includes another file, or has repeated keys, keys
            that import code, or aliases, which can expand exponentially.
    """
    import yaml

    size = file.stat().st_size
    if size > _LARGEST:
        raise InputError(
            f"{file}: recipes must have at most {_LARGEST} bytes, got {size}. Write a shorter one."
        )
    depth = 0
    try:
        text = file.read_text(encoding="utf-8")
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise InputError(
                    f"{file}: aliases are not allowed, got *{event.anchor} in line {line}. Write out the value."
                )
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise InputError(
                    f"{file}: recipes must have at most {_DEEPEST} levels of nesting. Write a flatter one."
                )
        root = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not readable YAML ({' '.join(str(error).split())[:200]}).") from error
    if not isinstance(root, yaml.MappingNode):
        content = "nothing" if root is None else f"a {root.id}"
        raise InputError(f"{file} must contain options, such as `seed: 1`, got {content}.")
    if any(key.value == "config" for key, _ in root.value):
        raise InputError(f"{file}: a recipe cannot include another one, got the key config. Copy its keys.")
    _check_keys(root, str(file))


def _check_inline(text: str) -> None:
    """Check the keys of a value such as `[{folder: images}]`; text that is not YAML is left to the parser.

    Raises:
        InputError: a repeated key, or a key that imports code.
    """
    import yaml

    try:
        _check_keys(
            yaml.compose(text, yaml.SafeLoader), text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
        )
    except (yaml.YAMLError, RecursionError):
        return


def _check_keys(node: Any, where: str) -> None:
    """Raise `InputError` for repeated keys, and keys with which the parser imports code."""
    import yaml

    keys: set[str] = set()
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = child if isinstance(child, tuple) else (None, child)
        if key is not None:
            line = key.start_mark.line + 1
            if str(key.value) in keys:
                raise InputError(
                    f"{where}: keys must be unique, got {key.value!r} twice, again in line {line}. Remove one."
                )
            if key.value in _IMPORTS:
                raise InputError(
                    f"{where}: the key {key.value!r} in line {line} is not allowed, since it imports code. Write "
                    "the options themselves."
                )
            keys.add(str(key.value))
        _check_keys(value, where)
