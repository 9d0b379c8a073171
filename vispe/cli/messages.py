"""Messages of the command line: names of Python parameters as options, and errors of the parser as one line."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence

from vispe.errors import did_you_mean

PERMISSIONS = frozenset({"allow_code", "allow_download"})
"""Options of every command with recipes, which are not parameters of its function."""

_ADVICE = (
    "Use ",
    "Pass ",
    "Set ",
    "Omit ",
    "Add ",
    "Train ",
    "Crop ",
    "use ",
    "pass ",
    "set ",
    "omit ",
    "add ",
)
_VALUE = r"'[^']*'|\[[^\]]*\]|\([^)]*\)|[^\s'\[(=,]*[^\s'\[(=,.]"


def name_options(text: str, function: Callable[..., int | None], positionals: Sequence[str] = ()) -> str:
    """Replace parameters of a command in a library message by the options of the command line.

    Parameters are in backticks, have a value in a clause of advice ("Use features=filters."), have no effect, or are
    the subject of a message of `vispe.utils.options`.

    Names in backticks that are not parameters of the command remain unchanged, unless `LIBRARY_NAMES` of the module of
    the command maps this name of the library to a parameter.

    Args:
        text: message, such as "`pos_embed` has no effect here."
        function: function of the command.
        positionals: positional parameters, which are printed in capitals, as in the usage line.

    >>> def command(images, pos_embed=None, from_=None): ...
    >>> name_options("`pos_embed`, `from='a'`, `images` and `other`", command, ("images",))
    '--pos-embed, --from a, IMAGES and `other`'
    >>> name_options("f: pos_embed needs a string, got pos_embed=1.", command)
    'f: --pos-embed needs a string, got --pos-embed 1.'
    >>> name_options("no pos_embed. Use pos_embed='a' or dim=3.", command)
    'no pos_embed. Use --pos-embed a or dim=3.'
    >>> name_options("pos_embed=['a', 'b'] has no effect on dim=c.", command)
    "--pos-embed ['a', 'b'] has no effect on dim=c."
    >>> name_options("pos_embed=True has no effect on from=a.", command)
    '--pos-embed has no effect on --from a.'
    >>> name_options("from has no effect without pos_embed. Omit it.", command)
    '--from has no effect without --pos-embed. Omit it.'
    """
    keys = {key.rstrip("_") for key in inspect.signature(function).parameters} | PERMISSIONS
    renamed = getattr(inspect.getmodule(function), "LIBRARY_NAMES", {})

    def option(match: re.Match[str]) -> str:
        key, value, words = match.groups()
        key = renamed.get(key, key)
        if key not in keys:
            return match[0]
        if key in positionals:
            return match[0] if value else key.upper()
        if value in (None, "", "True"):
            return flag(key) + words
        if value == "False":
            return flag(f"no_{key}") + words
        return f"{flag(key)} {value.strip(chr(39))}{words}"

    def checked_option(match: re.Match[str]) -> str:
        key, words = match.groups()
        key = renamed.get(key, key)
        named = key in keys and key not in positionals
        return f"{flag(key)}{words}got {flag(key)} " if named else match[0]

    text = re.sub(r"`([a-z]\w*)(?:=([^`\s]+))?`()", option, text)
    text = " ".join(
        re.sub(r"(?<![-\w`.(])([a-z]\w*)=([^\s`=,]*[^\s`=,.;])()", option, clause)
        if clause.startswith(_ADVICE)
        else clause
        for clause in re.split(r"(?<=[.;]) ", text)
    )
    no_effect = " has no effect (?:on|without)"
    text = re.sub(rf"(?<![-\w`.(])([a-z]\w*)=({_VALUE})({no_effect}| is not a class)", option, text)
    text = re.sub(rf"(?<![-\w`.(])([a-z]\w*)()({no_effect})", option, text)
    text = re.sub(r"(?<= has no effect without )([a-z]\w*)()(?=\.)()", option, text)
    text = re.sub(rf"(?<=no effect on )([a-z]\w*)=({_VALUE})()(?=[., ])", option, text)
    # messages of `vispe.utils.options`, such as "seed needs an integer, got seed='x'."
    return re.sub(r"(?<![-\w])([a-z]\w*)( (?:needs|is) .*?)got \1=", checked_option, text)


def flag(key: str) -> str:
    """Return the option of a parameter, such as `--img-size`."""
    return f"--{key.replace('_', '-')}"


def explain(name: str, message: str, options: Sequence[str], unavailable: Mapping[str, str]) -> str:
    """Rewrite an error message of the parser as one line that includes the remedy.

    Args:
        name: name of the command.
        message: message of the parser.
        options: options of the command.
        unavailable: explanation of each option that the command deliberately lacks.
    """
    see = f" See vispe {name} --help."
    keys = {option.lstrip("-").replace("-", "_"): option for option in options}

    def unknown(group: str, key: str) -> str:
        return f"{name}: unknown key {key!r} in {group}."

    def required(missing: str) -> str:
        return ", ".join(keys.get(key, key.upper()) for key in missing.split(", "))

    sentences: dict[str, Callable[..., str]] = {
        r"^unrecognized arguments: (-[^\s=]*)": lambda word: (
            f"{name} has no option {word!r}{unavailable.get(word) or '.' + did_you_mean(word, options)}"
        ),
        r"^unrecognized arguments: ([^\s=]+)": lambda word: (
            f"{name}: unexpected argument {word!r}. Write all positional arguments next to each other."
        ),
        r"^the following arguments are required: (.*)": lambda missing: (
            f"{name}: missing required argument {required(missing)}."
        ),
        r"^Option '([^']+)' is not accepted": lambda key: (
            f"{name}: unknown key {key!r} in the config file.{did_you_mean(key, keys)}"
        ),
        r"(?s)key \"([^\"]+)\".*Option '([^']+)' is not accepted": unknown,
        r"^Group '([^']+)' does not accept option '([^'.]+)": unknown,
    }
    for pattern, sentence in sentences.items():
        if match := re.search(pattern, message):
            return sentence(*match.groups()) + see
    if match := re.search(r"File does not exist: (.*)", message):
        return f"{name}: config file {match[1]} does not exist."
    if match := re.search(r"Path is not a file: (.*)", message):
        return f"{name}: --config must be a file, got {match[1]}."
    if parsed := re.findall(r'[Pp]arser key "([^"]+)"', message):
        option = _nested_option(parsed, keys)
        if match := re.search(r"the following arguments are required: (.*)", message):
            return f"{name}: {option} needs the key {match[1]}.{see}"
        values = re.findall(r"Got value: (.*)", message) or re.findall(r"Given value: (.*)", message)
        expected = re.findall(r"Expected (?:an? )?(.*?)(?:\.? Got|\n|$)", message)
        if values and expected:
            return f"{name}: {option} must be {_kinds(expected)}, got {values[-1]!r}.{see}"
        if match := re.search(r"Not a valid subclass of \w+\. Got value: (.*)", message):
            return f"{name}: {option} must be a list of mappings, such as '[{{key: value}}]', got {match[1]!r}.{see}"
        if match := re.search(r"Unable to load config '(.*)'", message):
            return f"{name}: {option} must be a mapping, such as '{{key: value}}', got {match[1]!r}.{see}"
    return f"{name}: {' '.join(message.split()).rstrip('.')}.{see}"


def _nested_option(parsed: Sequence[str], options: Mapping[str, str]) -> str:
    """Return the option of the outermost key of an error of the parser, with the innermost key."""
    first, last = parsed[0], parsed[-1]
    if first == last:
        return options.get(first, first)
    if last.startswith(f"{first}."):
        return options.get(last, last)
    return f"{options.get(first, first)}: {last}"


def _kinds(expected: Sequence[str]) -> str:
    """Return the expected types or choices in readable form."""
    names = {
        "<class 'int'>": "an integer",
        "<class 'float'>": "a number",
        "<class 'bool'>": "true or false",
        "<class 'str'>": "a string",
        "<class 'list'>": "a list",
        "<class 'dict'>": "a mapping",
        "<class 'NoneType'>": "",
    }
    kinds = [
        names.get(kind, re.sub(r"<class '(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", kind))
        for kind in expected
    ]
    return " or ".join(dict.fromkeys(kind.replace(", ", " or ") for kind in kinds if kind))
