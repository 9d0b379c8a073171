"""Option parsing: command-line arguments as keyword arguments of a command, with one-line error messages."""

import functools
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vispe.cli.messages import PERMISSIONS, explain, flag
from vispe.cli.shared_options import SHARED
from vispe.errors import OptionError, counted, require
from vispe.train.retrofit.recipe_files import check_groups, configured_values, resolve_recipes

if typing.TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_HELP_ALL = "--help-all"
_RESERVED = PERMISSIONS | {"config", "print_config", "debug", "help", "help_all"}


def read_options(
    name: str,
    function: Callable[..., int | None],
    positionals: Sequence[str],
    short: Mapping[str, str],
    words: Sequence[str],
) -> dict[str, object]:
    """Parse the arguments of a command into keyword arguments of its function.

    Args:
        name: name of the command.
        function: function whose signature and docstring define the interface (see `vispe.cli.main`).
        positionals: positional parameters, in order.
        short: one-letter option of each parameter.
        words: arguments after the command.

    Raises:
        OptionError: an option is unknown, missing, or has a value of the wrong type.
        MissingExtra: jsonargparse is not installed.
    """
    require("jsonargparse", "cli", f"the command `vispe {name}`")
    from argparse import ArgumentError

    short_help = bool({"--help", "-h"} & set(words))
    parser, options, lists = _parser(name, function, tuple(positionals), tuple(short.items()), short_help)
    words = ["--help" if word == _HELP_ALL else word for word in words]
    module, parameters = inspect.getmodule(function), inspect.signature(function).parameters
    multi_word = [flag(key) for key in getattr(module, "MULTI_WORD", ())]
    optional_value = {flag(key): value for key, value in getattr(module, "OPTIONAL_VALUE", {}).items()}
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the former name
    resolved, hints = resolve_recipes(words), typing.get_type_hints(function)
    check_groups(resolved, hints)
    configured = _configured(name, resolved, {key: hints[key] for key in positionals})
    try:
        argv = normalize_argv(resolved, lists, multi_word, optional_value)
        with _positional_defaults(parser, configured):
            values = vars(instantiate(parser.parse_args(argv)))
    except ArgumentError as error:
        unavailable = {flag(key): why for key, why in getattr(module, "UNAVAILABLE", {}).items()}
        raise OptionError(explain(name, str(error.message), options, unavailable)) from error
    for key, parameter in parameters.items():
        # such as an unset shell variable
        if values.get(key.rstrip("_")) == "" and parameter.default != "":
            option = key.upper() if key in positionals else flag(key.rstrip("_"))
            raise OptionError(
                f"{name}: {option} must not be empty, got ''. Check that shell variables are set."
            )
        # the parser accepts any value of a config file for a flag
        if hints[key] is bool and not isinstance(values[key], bool):
            raise OptionError(
                f"{name}: {flag(key)} must be true or false, got {values[key]!r} in the config file."
            )
    return {key: values[key.rstrip("_")] for key in parameters if key.rstrip("_") in values}


@contextmanager
def _positional_defaults(parser: "ArgumentParser", values: Mapping[str, object]) -> Iterator[None]:
    """Set defaults of positional arguments: argparse sets missing ones to their defaults, also after a config file."""
    actions = {action.dest: action for action in parser._actions if action.dest in values}
    before = {key: action.default for key, action in actions.items()}
    try:
        for key, action in actions.items():
            action.default = values[key]
        yield
    finally:
        for key, action in actions.items():
            action.default = before[key]


def _configured(name: str, words: Sequence[str], hints: Mapping[str, typing.Any]) -> dict[str, object]:
    """Return the values of positional arguments in config files.

    Raises:
        OptionError: a value is not a string, or not a list of strings.
    """
    values = {key: value for key, value in configured_values(words).items() if key in hints}
    for key, value in values.items():
        several = _item_type(hints[key]) is not None
        entries = value if several and isinstance(value, list) else [value]
        if value is not None and (
            several != isinstance(value, list) or not all(isinstance(entry, str) for entry in entries)
        ):
            kind = "a list of strings, such as [a, b]" if several else "a string"
            raise OptionError(f"{name}: {key} must be {kind}, got {value!r} in the config file.")
    return values


@functools.lru_cache(maxsize=64)
def _parser(
    name: str,
    function: Callable[..., int | None],
    positionals: tuple[str, ...],
    short: tuple[tuple[str, str], ...],
    short_help: bool,
) -> tuple["ArgumentParser", list[str], dict[str, type]]:
    """Return the parser of a command, its options, and the item type of each list option.

    Cached, as a parser of 50 options takes 30 ms. `short_help` hides options that are rarely used from `--help`.

    Raises:
        TypeError: a parameter of the function has a reserved name.
    """
    from argparse import SUPPRESS, RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
        pass

    text, helps, examples = command_help(function)
    # --help does not list rarely used options; --print_config does
    hidden = getattr(inspect.getmodule(function), "ADVANCED", ()) if short_help else ()
    epilog = "--debug shows the traceback of an error"
    if hidden:
        epilog += f"\n{_HELP_ALL} also shows {counted(len(hidden), 'option')} that are rarely needed"
    parser = ArgumentParser(
        prog=f"vispe {name}",
        exit_on_error=False,
        allow_abbrev=False,
        default_env=False,
        description=text,
        epilog=epilog + (f"\n\nexamples:\n{examples}" if examples else ""),
        formatter_class=Formatter,
    )
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    if clash := _RESERVED & set(parameters):
        raise TypeError(f"vispe {name}: parameters {sorted(clash)} are reserved. Rename them.")
    letters = dict(short)
    for key in [*positionals, *(key for key in parameters if key not in positionals)]:
        default, option_help = parameters[key].default, SUPPRESS if key in hidden else helps.get(key)
        _add(parser, key.rstrip("_"), hints[key], default, option_help, key in positionals, letters.get(key))
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of these options, or the name of a recipe of vispe; later options override it",
    )
    options = [text for action in parser._actions for text in action.option_strings if text[-1] != "+"]
    lists = {flag(key): item for key in parameters if (item := _item_type(hints[key])) is not None}
    return parser, options, lists


def command_help(function: Callable[..., int | None]) -> tuple[str, dict[str, str], str]:
    """Return the text of a command, the help of each parameter, and the examples.

    Parameters that the docstring does not describe have the help of `vispe.cli.shared_options`.
    """
    text, helps, examples = read_docstring(inspect.getdoc(function) or "")
    shared = {key: SHARED[key] for key in inspect.signature(function).parameters if key in SHARED}
    return text, shared | helps, examples


def read_docstring(doc: str) -> tuple[str, dict[str, str], str]:
    """Split a Google docstring into its text, the help of each argument, and its examples."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in doc.splitlines():
        if line in ("Args:", "Returns:", "Raises:", "Example:", "Examples:"):
            current = line.rstrip("s:")
            sections[current] = []
        else:
            sections[current].append(line)
    helps: dict[str, str] = {}
    key = ""
    for line in sections.get("Arg", []):
        if line.startswith("    ") and not line.startswith("     "):
            key, _, line = line.strip().partition(":")
        helps[key] = f"{helps.get(key, '')} {line.strip()}".strip()
    helps.pop("", None)
    return "\n".join(sections[""]).strip(), helps, "\n".join(sections.get("Example", [])).rstrip()


def normalize_argv(
    words: Sequence[str],
    lists: Mapping[str, type],
    multi_word: Sequence[str] = (),
    optional_value: Mapping[str, str] | None = None,
) -> list[str]:
    """Rewrite list options for the parser: `1,2` becomes `[1,2]`, and `a,b` becomes `["a", "b"]`.

    Args:
        words: command-line arguments.
        lists: item type of each list option.
        multi_word: list options that consume all arguments up to the next option.
        optional_value: value of options written without one; the next argument is parsed as their value only if it is
            a number or equal to that value.

    Raises:
        OptionError: a text is not valid UTF-8.

    >>> scales, cluster = {"--scales": float}, {"--cluster": "auto"}
    >>> normalize_argv(["--scales", "1,2", "--cluster", "a.png"], scales, optional_value=cluster)
    ['--scales', '[1,2]', '--cluster', 'auto', 'a.png']
    """
    rest, optional_value = list(words), optional_value or {}
    result: list[str] = []
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if equals and option in lists:
            word = f"{option}={_bracket(option, value, lists[option])}"
        result.append(word)
        if word in multi_word:
            end = next((k for k, w in enumerate(rest) if w.startswith("-") and w != "-"), len(rest))
            parts = [part for w in rest[:end] for part in map(str.strip, w.split(",")) if part]
            result.append(_list_of_texts(word, parts))
            del rest[:end]
        elif word in optional_value and not (
            rest and (rest[0] == optional_value[word] or re.fullmatch(r"[-+]?[\d.]+", rest[0]))
        ):
            result.append(optional_value[word])
        elif word in lists and rest:
            result.append(_bracket(word, rest.pop(0), lists[word]))
    return result


def _add(parser, key: str, hint, default, text: str | None, positional: bool, short: str | None) -> None:
    """Add the parameter `key` of a command to its parser."""
    from jsonargparse import ActionYesNo

    required = default is inspect.Parameter.empty
    text = text or ""
    if positional:
        item = _item_type(hint)
        nargs = (None if required else "?") if item is None else "+" if required else "*"
        extra = {} if required else {"default": default}
        parser.add_argument(key, nargs=nargs, type=item or hint, help=text, **extra)
        return
    flags = [*([short] if short else []), flag(key)]
    if hint is bool and default is True:
        yes_no = ActionYesNo(yes_prefix="", no_prefix="no-")
        parser.add_argument(*flags, action=yes_no, default=True, help=text)
    elif hint is bool and default is False:
        parser.add_argument(*flags, action="store_true", help=text)
    else:
        # plain `str`: jsonargparse would parse a `str | None` value as YAML, so that '#a.json' became None
        kind = str if hint == str | None and default is None else hint
        extra = {"required": True} if required else {"default": default}
        parser.add_argument(*flags, type=kind, help=text, **extra)


def _item_type(hint) -> type | None:
    """Return the item type if `hint` is a list (or `list | None`), else `None`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


def _bracket(option: str, value: str, item: type) -> str:
    """Write the value of a list option as a YAML list; the name of an existing file is never split at commas."""
    is_file = item is str and os.path.lexists(value)
    if value.startswith("[") and not is_file and (item is not str or value.endswith("]")):
        return value
    parts = [value] if is_file else [part.strip() for part in value.split(",") if part.strip()]
    return _list_of_texts(option, parts) if item is str else f"[{','.join(parts)}]"


def _list_of_texts(option: str, texts: Sequence[str]) -> str:
    """Quote texts as a YAML list that is read back unchanged."""
    for text in texts:
        # lone surrogates stand for undecodable bytes of a file name
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise OptionError(
                f"{option}: file names must be valid UTF-8, got {text!r}. Rename the file, or pass its folder."
            )
    # JSON escapes characters above U+FFFF as surrogate pairs, which YAML rejects
    quoted = ("".join(c if c > "\uffff" else json.dumps(c)[1:-1] for c in text) for text in texts)
    return "[" + ", ".join(f'"{text}"' for text in quoted) + "]"
