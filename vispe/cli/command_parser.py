"""Parser of a command, from the signature, the type hints and the docstring of its function."""

import functools
import inspect
import types
import typing
from collections.abc import Callable

from vispe.cli.messages import PERMISSIONS, flag
from vispe.cli.shared_options import SHARED
from vispe.errors import counted

if typing.TYPE_CHECKING:
    from jsonargparse import ArgumentParser

HELP_ALL = "--help-all"
"""Option that also shows the options of `ADVANCED`, see `vispe.cli.main`."""

_RESERVED = PERMISSIONS | {"config", "print_config", "debug", "help", "help_all"}


@functools.lru_cache(maxsize=64)
def command_parser(
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
        epilog += f"\n{HELP_ALL} also shows {counted(len(hidden), 'option')} that are rarely needed"
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
        _add_parameter(
            parser, key.rstrip("_"), hints[key], default, option_help, key in positionals, letters.get(key)
        )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of these options, or the name of a recipe of vispe; later options override it",
    )
    options = [text for action in parser._actions for text in action.option_strings if text[-1] != "+"]
    lists = {flag(key): item for key in parameters if (item := item_type(hints[key])) is not None}
    return parser, options, lists


def _add_parameter(
    parser, key: str, hint, default, text: str | None, positional: bool, short: str | None
) -> None:
    """Add the parameter `key` of a command to its parser."""
    from jsonargparse import ActionYesNo

    required = default is inspect.Parameter.empty
    text = text or ""
    if positional:
        item = item_type(hint)
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


def item_type(hint) -> type | None:
    """Return the item type if `hint` is a list (or `list | None`), else `None`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


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
