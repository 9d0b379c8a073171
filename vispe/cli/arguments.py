"""Option parsing: command-line arguments as keyword arguments of a command, with one-line error messages."""

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vispe.cli.argv import normalize_argv
from vispe.cli.command_parser import HELP_ALL, command_parser, item_type
from vispe.cli.messages import explain, flag
from vispe.errors import OptionError, require
from vispe.train.retrofit.recipe_files import check_groups, configured_values, resolve_recipes

if typing.TYPE_CHECKING:
    from jsonargparse import ArgumentParser


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
    parser, options, lists = command_parser(
        name, function, tuple(positionals), tuple(short.items()), short_help
    )
    words = ["--help" if word == HELP_ALL else word for word in words]
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
        several = item_type(hints[key]) is not None
        entries = value if several and isinstance(value, list) else [value]
        if value is not None and (
            several != isinstance(value, list) or not all(isinstance(entry, str) for entry in entries)
        ):
            kind = "a list of strings, such as [a, b]" if several else "a string"
            raise OptionError(f"{name}: {key} must be {kind}, got {value!r} in the config file.")
    return values
