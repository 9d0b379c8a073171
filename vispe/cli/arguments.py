"""The words after a command as the arguments of its function, and in one line what is wrong with them."""

import inspect
import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence

from vispe.errors import OptionError, did_you_mean, require
from vispe.train.retrofit.recipe_files import with_recipes

_RESERVED = frozenset({"config", "print_config", "debug", "help", "allow_code", "allow_download"})


def read_options(
    name: str,
    function: Callable[..., int | None],
    positionals: Sequence[str],
    short: Mapping[str, str],
    words: Sequence[str],
) -> dict[str, object]:
    """Return the arguments that words give the function of a command.

    Args:
        name: the command.
        function: its signature and docstring are the interface, as `vispe.cli.main` describes.
        positionals: parameters written without `--`, in order.
        short: options of one letter by parameter.
        words: what stands behind the command.

    Raises:
        OptionError: an option that does not exist, is missing, or has a value of the wrong type.
        MissingExtra: jsonargparse is not installed.
    """
    require("jsonargparse", "cli", f"the command `vispe {name}`")
    from argparse import ArgumentError, RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
        pass

    text, helps, examples = read_docstring(inspect.getdoc(function) or "")
    parser = ArgumentParser(
        prog=f"vispe {name}",
        exit_on_error=False,
        allow_abbrev=False,
        default_env=False,
        description=text,
        epilog="--debug shows the traceback of an error" + (f"\n\nexamples:\n{examples}" if examples else ""),
        formatter_class=Formatter,
    )
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    if clash := _RESERVED & set(parameters):
        raise TypeError(f"vispe {name} defines the reserved parameter(s) {sorted(clash)}")
    for key in [*positionals, *(key for key in parameters if key not in positionals)]:
        default = parameters[key].default
        _add(parser, key.rstrip("_"), hints[key], default, helps.get(key), key in positionals, short.get(key))
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of these options, or a recipe of vispe by its name; options after it win",
    )
    options = [text for action in parser._actions for text in action.option_strings if text[-1] != "+"]
    lists = {_flag(key): item for key in parameters if (item := _item_type(hints[key])) is not None}
    module = inspect.getmodule(function)
    several = [_flag(key) for key in getattr(module, "SEVERAL", ())]
    bare = {_flag(key): value for key, value in getattr(module, "BARE", {}).items()}
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    try:
        values = vars(instantiate(parser.parse_args(spelled(with_recipes(words), lists, several, bare))))
    except ArgumentError as error:
        elsewhere = {_flag(key): why for key, why in getattr(module, "ELSEWHERE", {}).items()}
        raise OptionError(_explain(name, str(error.message), options, elsewhere)) from error
    return {key: values[key.rstrip("_")] for key in parameters if key.rstrip("_") in values}


def read_docstring(doc: str) -> tuple[str, dict[str, str], str]:
    """Split a Google docstring into its text, the help of each argument, and its examples."""
    parts = re.split(r"^(Args|Returns|Raises|Examples?):\n", doc, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    helps: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + sections.get("Args", "").rstrip())[1:]:
        key, _, text = entry.partition(":")
        helps[key.strip()] = " ".join(text.split())
    examples = sections.get("Examples", sections.get("Example", "")).rstrip()
    return parts[0].strip(), helps, examples


def spelled(
    words: Sequence[str],
    lists: Mapping[str, type],
    several: Sequence[str] = (),
    bare: Mapping[str, str] | None = None,
) -> list[str]:
    """Return words as the parser reads them: `1,2` for a list becomes `[1,2]`, and `a,b` becomes `["a", "b"]`.

    Args:
        words: of a command line.
        lists: type of the items by list option.
        several: list options that take all words up to the next option.
        bare: value of options that may stand alone; the next word is theirs if it is a number or that value.

    >>> spelled(["--scales", "1,2", "--cluster", "a.png"], {"--scales": float}, bare={"--cluster": "auto"})
    ['--scales', '[1,2]', '--cluster', 'auto', 'a.png']
    """
    rest, bare = list(words), bare or {}
    result: list[str] = []
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if equals and option in lists:
            word = f"{option}={_bracket(option, value, lists[option])}"
        result.append(word)
        if word in several:
            end = next((k for k, w in enumerate(rest) if w.startswith("-") and w != "-"), len(rest))
            parts = [part for w in rest[:end] for part in map(str.strip, w.split(",")) if part]
            result.append(_list_of_texts(word, parts))
            del rest[:end]
        elif word in bare and not (rest and (rest[0] == bare[word] or re.fullmatch(r"[-+]?[\d.]+", rest[0]))):
            result.append(bare[word])
        elif word in lists and rest:
            result.append(_bracket(word, rest.pop(0), lists[word]))
    return result


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


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
    flags = [*([short] if short else []), _flag(key)]
    if hint is bool and default is True:
        yes_no = ActionYesNo(yes_prefix="", no_prefix="no-")
        parser.add_argument(*flags, action=yes_no, default=True, help=text)
    elif hint is bool and default is False:
        parser.add_argument(*flags, action="store_true", help=text)
    else:
        # a text is taken as it is: as `str | None` it would be read as YAML, and '#a.json' be None
        kind = str if hint == str | None and default is None else hint
        extra = {"required": True} if required else {"default": default}
        parser.add_argument(*flags, type=kind, help=text, **extra)


def _item_type(hint) -> type | None:
    """Return the item type when `hint` is a list (or `list | None`), else `None`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


def _bracket(option: str, value: str, item: type) -> str:
    """Write the value of a list option as a list; a text that names an existing file is never divided at commas."""
    named = item is str and os.path.lexists(value)
    if value.startswith("[") and not named and (item is not str or value.endswith("]")):
        return value
    parts = [value] if named else [part.strip() for part in value.split(",") if part.strip()]
    return _list_of_texts(option, parts) if item is str else f"[{','.join(parts)}]"


def _list_of_texts(option: str, texts: Sequence[str]) -> str:
    """Write texts as a list that YAML reads back as they are."""
    for text in texts:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise OptionError(
                f"{option} was given the name {text!r}, which is not valid UTF-8; rename the file, or name its folder."
            )
    # JSON writes characters beyond U+FFFF as two halves, which YAML refuses
    quoted = ("".join(c if c > "\uffff" else json.dumps(c)[1:-1] for c in text) for text in texts)
    return "[" + ", ".join(f'"{text}"' for text in quoted) + "]"


def _explain(name: str, message: str, options: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Turn a message of the parser into one line that says what to do.

    Args:
        name: of the command.
        message: of the parser.
        options: of the command.
        elsewhere: sentence for each option that the command does not have for a reason.
    """
    see = f" See vispe {name} --help."
    keys = {option.lstrip("-").replace("-", "_"): option for option in options}

    def unknown(group: str, key: str) -> str:
        return f"{name} was given the unknown key {key!r} in {group}."

    def needed(missing: str) -> str:
        return ", ".join(keys.get(key, key.upper()) for key in missing.split(", "))

    sentences: dict[str, Callable[..., str]] = {
        r"^unrecognized arguments: (-[^\s=]*)": lambda word: (
            f"{name} has no option {word!r}{elsewhere.get(word) or '.' + did_you_mean(word, options)}"
        ),
        r"^unrecognized arguments: ([^\s=]+)": lambda word: (
            f"{name} got {word!r} where no further value is expected; keep the values without `--` together."
        ),
        r"^the following arguments are required: (.*)": lambda missing: (
            f"{name} needs {needed(missing)}, which was not given."
        ),
        r"^Option '([^']+)' is not accepted": lambda key: (
            f"The config file of {name} has the unknown key {key!r}.{did_you_mean(key, keys)}"
        ),
        r"(?s)key \"([^\"]+)\".*Option '([^']+)' is not accepted": unknown,
        r"^Group '([^']+)' does not accept option '([^'.]+)": unknown,
    }
    for pattern, sentence in sentences.items():
        if match := re.search(pattern, message):
            return sentence(*match.groups()) + see
    if match := re.search(r"File does not exist: (.*)", message):
        return f"The config file {match[1]} does not exist."
    if match := re.match(r'Parser key "([^"]+)"', message):
        given = re.findall(r"(?:Given value:|Got value:) (.*)", message)
        expected = re.findall(r"Expected an? (.*?)(?:\.? Got|\n|$)", message)
        if given and expected:
            return f"{name} needs {keys.get(match[1], match[1])} to be {_kinds(expected)}, got {given[-1]!r}.{see}"
    return f"{name}: {' '.join(message.split()).rstrip('.')}.{see}"


def _kinds(expected: Sequence[str]) -> str:
    """Say in plain words which types or values the parser expected."""
    names = {"<class 'int'>": "a whole number", "<class 'float'>": "a number", "<class 'NoneType'>": ""}
    words = [
        names.get(kind, re.sub(r"<class '(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", kind))
        for kind in expected
    ]
    return " or ".join(dict.fromkeys(word.replace(", ", " or ") for word in words if word))
