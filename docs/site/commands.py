"""Page of all commands, generated from their functions: descriptions, options with defaults, examples."""

from __future__ import annotations

import inspect
import types
import typing

from vispe.cli.command_parser import command_help
from vispe.cli.main import COMMANDS, load_command


def commands_page() -> str:
    """Return the page in Markdown."""
    parts = [
        "# Commands\n",
        "Every command accepts `--help` (`--help-all` lists rarely needed options as well), `--config FILE` (YAML with "
        "any of its options) and `--debug` (the "
        "traceback of an error). Results go to standard output, progress and warnings to standard error; the exit "
        "code is 0, or 2 after bad input.\n",
    ]
    return "\n".join(parts + [command_section(name) for name in COMMANDS])


def command_section(name: str) -> str:
    """Return the section of one command."""
    function, positionals, short = load_command(name)
    text, helps, examples = command_help(function)
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    shown = " ".join(_word(key, hints[key], parameters[key]) for key in positionals)
    head, _, rest = text.partition("\n\n")
    parts = [f"## vispe {name}\n", f"`{f'vispe {name} {shown}'.strip()} [options]`\n", f"{_plain(head)}\n"]
    parts += [f"{_plain(rest)}\n"] if rest else []
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for key, parameter in parameters.items():
        named = f"`{key}`" if key in positionals else f"`--{key.strip('_').replace('_', '-')}`"
        named = f"`{short[key]}`, {named}" if key in short else named
        default = "required" if parameter.default is parameter.empty else _default(parameter.default)
        rows.append(f"| {named} | {_kind(hints[key])} | {default} | {_cell(helps.get(key, ''))} |")
    parts += ["\n".join(rows) + "\n"] if len(rows) > 2 else []
    parts += [f"```bash\n{inspect.cleandoc(examples)}\n```\n"] if examples else []
    return "\n".join(parts)


def _word(key: str, hint: object, parameter: inspect.Parameter) -> str:
    several = " ..." if "list" in str(hint) else ""
    return f"{key.upper()}{several}" if parameter.default is parameter.empty else f"[{key.upper()}{several}]"


def _kind(hint: object) -> str:
    """Return a readable description of the type of an option."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in inside if part is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inside)
    if origin is list:
        return f"{_kind(inside[0])}, comma-separated"
    words = {str: "text", int: "integer", float: "number", bool: "flag", dict: "YAML"}
    return words.get(hint, str(getattr(hint, "__name__", hint)))  # type: ignore[call-overload]


def _default(value: object) -> str:
    if value is None:
        return ""
    return ("on" if value else "off") if isinstance(value, bool) else f"`{value}`"


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    """Escape Markdown markup outside of code."""
    return "`".join(
        part if k % 2 else part.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
        for k, part in enumerate(text.split("`"))
    )
