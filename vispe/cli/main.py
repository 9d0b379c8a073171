"""The command `vispe`: finds the subcommand, reads its options, turns errors into one line.

Convention for a command (each lives in its own module and has no logic beyond calling the library):

- Command NAME is the function NAME in `vispe/cli/commands/NAME.py` (`_` for `-`), listed in `COMMANDS` below. Its
module
  imports heavy packages inside the function, so that help stays quick. A name of two words (`plot positions`, with
  `_` for the space) has a module, options and help of its own.
- The signature is the interface: a parameter `img_size: int | None = None` is the option `--img-size`;
  without a default it is required. `bool = False` gives `--flag`, `bool = True` gives `--flag / --no-flag`;
  `list[...]` options are written `--scales 1,2,4` (or as a YAML list in the file of `--config`; texts that hold
  commas as `'["a,b", "c"]'`, the name of one existing file as it is); `Literal` gives choices. `from_` is the
  option `--from`, whose name Python does not allow.
- Module constant `POSITIONALS = ("images",)` names the parameters written without `--`, in this order; one of
  type `list[...]` takes any number (at least one when it has no default).
- Module constant `SHORT = {"out": "-o"}` gives parameters a one-letter form.
- Module constant `BARE = {"cluster": "auto"}` gives options a value for when they stand alone: `--cluster` means
  `--cluster auto`. The next word is its value only if it is a number or that word, so `--cluster a.png` keeps the
  image.
- Module constant `SEVERAL = ("text",)` names list options that take all words up to the next option:
  `--text matrix precipitate`.
- The Google docstring is the help: the first line, the text, `Args:`, and at the end `Examples:`.
- Results go to stdout, progress and warnings to stderr. Return `None` or 0 for success, else the exit code.
- `--config FILE`, `--print_config` and `--debug` belong to this module; commands do not define them.
"""

import importlib
import inspect
import json
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vispe.cli.streams import outlasting_readers
from vispe.errors import OptionError, UnknownName, VispeError, did_you_mean, is_memory, require
from vispe.train.retrofit.recipes import with_recipes

COMMANDS: dict[str, str] = {
    "list": "List the positional encodings.",
    "info": "Show what one encoding is, its options, presets and hosts; without a name, the hosts of all encodings.",
    "plot": "Draw what an encoding adds to attention around a query patch.",
    "plot positions": "Draw the coordinates that position schemes give text, images and videos.",
    "segment": "Segment micrographs from a few scribbles, from no labels, or from words.",
    "apply": "Segment more images with a model that `vispe segment` wrote.",
    "probe": "Measure how much position a model's features reveal.",
    "rotate": "Measure what turning, mirroring and shifting a sample changes in a model's features or a segmentation.",
    "threecell": "Train small models on the three-cell benchmark and score what their encodings can tell.",
    "health": "Report which attention heads of a model collapse, stay local, or look at places instead of things.",
    "retrofit": "Remove positional bias from a pretrained vision transformer by distillation.",
    "retrofit evaluate": "Measure what a retrofit took and what it left: before and after, on one page.",
    "convert-weights": "Rename the weights of a released checkpoint to vispe's names.",
    "bench": "Measure on this machine which backend is the fastest for attention with a position bias.",
    "doctor": "Show what this installation has; with a model, which attention path its layers take and why.",
    "cite": "Print how to cite vispe and the encodings.",
}
_RESERVED = frozenset({"config", "print_config", "debug", "help"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    Args:
        argv: words after `vispe`; `None` takes them from the process.

    Returns:
        0 on success, also where the reader of stdout went away before the end; 2 after bad input (one line on
        stderr); 130 after Ctrl-C; otherwise what the command returned.
    """
    with outlasting_readers():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(words: list[str]) -> int:
    """Run the command line `words` and return its exit code."""
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    plain = warnings.formatwarning
    warnings.formatwarning = _format_warning
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        if debug:
            raise
        return _fail("stopped by Ctrl-C; the files that were already finished are complete.", 130)
    except (VispeError, OSError, ModuleNotFoundError) as error:
        if debug or (isinstance(error, ModuleNotFoundError) and not _is_extra(error)):
            raise
        return _fail(_sentence(error), 2)
    except (MemoryError, RuntimeError) as error:
        if debug or not is_memory(error):
            raise
        said = _sentence(error).rstrip(".") or "no size given"
        return _fail(f"memory ran out ({said}); give fewer or smaller files, or close other programs.", 2)
    finally:
        warnings.formatwarning = plain


def load_command(name: str) -> tuple[Callable[..., int | None], tuple[str, ...], dict[str, str]]:
    """Import the module of one command and return its function, positionals and short options."""
    if name not in COMMANDS:
        raise UnknownName(
            f"There is no command {name!r}.{did_you_mean(name, COMMANDS)} "
            f"The commands are {', '.join(COMMANDS)}."
        )
    function = name.replace("-", "_").replace(" ", "_")
    module = importlib.import_module(f"vispe.cli.commands.{function}")
    return getattr(module, function), getattr(module, "POSITIONALS", ()), getattr(module, "SHORT", {})


def parse(name: str, words: Sequence[str]) -> tuple[Callable[..., int | None], dict[str, object]]:
    """Return the function of command `name` and the arguments that `words` give it.

    Raises:
        UnknownName: unknown command.
        OptionError: an option that does not exist, is missing, or has a value of the wrong type.
        MissingExtra: jsonargparse is not installed.
    """
    require("jsonargparse", "cli", f"the command `vispe {name}`")
    from argparse import ArgumentError, RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
        pass

    function, positionals, short = load_command(name)
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
        option = key.rstrip("_")
        _add(parser, option, hints[key], default, helps.get(key), key in positionals, short.get(key))
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of these options, or a recipe of vispe by its name; options after it win",
    )
    options = [text for action in parser._actions for text in action.option_strings if text[-1] != "+"]
    lists = {
        f"--{key.replace('_', '-')}": item
        for key in parameters
        if (item := _item_type(hints[key])) is not None
    }
    try:
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
        words = _gather_words(words, getattr(inspect.getmodule(function), "SEVERAL", ()))
        words = _fill_bare(words, getattr(inspect.getmodule(function), "BARE", {}))
        values = instantiate(parser.parse_args(_bracket_lists(with_recipes(words), lists)))
    except ArgumentError as error:
        raise OptionError(_explain(name, str(error.message), options)) from error
    given = vars(values)
    return function, {key: given[key.rstrip("_")] for key in parameters if key.rstrip("_") in given}


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


def summary() -> str:
    """Return the text of `vispe --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: vispe COMMAND ...\n\n"
        "Positional encodings for vision transformers: swap them by name, measure the bias they leave,\n"
        "and segment micrographs.\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n"
        "  -h, --help  this text; `vispe COMMAND --help` shows the options and examples of a command\n"
        "  --version   print the version\n"
        "  --debug     show the traceback of an error\n\n"
        "examples:\n"
        "    vispe list 'rope*'\n"
        "    vispe segment micrograph.png --labels scribbles.png -o out\n"
        "    vispe probe vit_small_patch16_224 images/*.png -o out"
    )


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(summary())
        return 0 if words else 2
    if words[0] == "--version":
        import vispe

        print(f"vispe {vispe.__version__}")
        return 0
    if words[0].startswith("-"):
        raise OptionError(f"`vispe {words[0]}` has no command; write the command first. See vispe --help.")
    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    try:
        function, arguments = parse(" ".join(words[:length]), words[length:])
    except SystemExit as stop:  # --help and --print_config end here
        return int(stop.code or 0)
    return function(**arguments) or 0


def _add(parser, key: str, hint, default, text: str | None, positional: bool, short: str | None) -> None:
    """Add the parameter `key` of a command to its parser."""
    from jsonargparse import ActionYesNo

    given = default is not inspect.Parameter.empty
    text = text or ""
    if positional:
        item = _item_type(hint)
        nargs = {(True, True): "*", (True, False): "+", (False, True): "?", (False, False): None}[
            item is not None, given
        ]
        extra = {"default": default} if given else {}
        parser.add_argument(key, nargs=nargs, type=hint if item is None else item, help=text, **extra)
        return
    flags = [*([short] if short else []), f"--{key.replace('_', '-')}"]
    if hint is bool and default is True:
        parser.add_argument(
            *flags, action=ActionYesNo(yes_prefix="", no_prefix="no-"), default=True, help=text
        )
    elif hint is bool and default is False:
        parser.add_argument(*flags, action="store_true", help=text)
    else:
        extra = {"default": default} if given else {"required": True}
        if hint == str | None and default is None:
            hint = str  # a text is taken as it is: as `str | None` it would be read as YAML, and '#a.json' be None
        parser.add_argument(*flags, type=hint, help=text, **extra)


def _item_type(hint) -> type | None:
    """Return the item type when `hint` is a list (or `list | None`), else `None`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


def _gather_words(words: Sequence[str], several: Sequence[str]) -> list[str]:
    """Join the words after options that take several into one value, a list."""
    result: list[str] = []
    taking: list[str] | None = None
    for word in words:
        if taking is not None and (not word.startswith("-") or word == "-"):
            taking += [part for part in map(str.strip, word.split(",")) if part]
            result[-1] = _list_of_texts(result[-2], taking)
            continue
        result.append(word)
        taking = None
        if word.startswith("--") and word[2:].replace("-", "_") in several:
            taking = []
            result.append("[]")
    return result


def _fill_bare(words: Sequence[str], bare: Mapping[str, str]) -> list[str]:
    """Give options that may stand alone their value, where the next word is none."""
    result: list[str] = []
    for word, after in zip(words, [*words[1:], ""][: len(words)], strict=True):
        value = bare.get(word.removeprefix("--").replace("-", "_")) if word.startswith("--") else None
        given = after == value or re.fullmatch(r"[-+]?[\d.]+", after)
        result += [word] if value is None or given else [word, value]
    return result


def _bracket_lists(words: Sequence[str], lists: Mapping[str, type]) -> list[str]:
    """Rewrite the values of list options, `1,2` to `[1,2]` and `a,b` to `["a","b"]`."""
    result: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option in lists:
            result.append(f"{option}={_bracket(option, value, lists[option])}")
        elif result and result[-1] in lists:
            result.append(_bracket(result[-1], word, lists[result[-1]]))
        else:
            result.append(word)
    return result


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


def _explain(name: str, message: str, options: Sequence[str]) -> str:
    """Turn a message of the parser into one line that says what to do."""
    see = f" See vispe {name} --help."
    keys = {option.lstrip("-").replace("-", "_"): option for option in options}
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        word = found[1].partition("=")[0]
        if word.startswith("-"):
            return f"{name} has no option {word!r}.{did_you_mean(word, options)}{see}"
        hint = "keep the values without `--` together"
        return f"{name} got {word!r} where no further value is expected; {hint}.{see}"
    if found := re.match(r"the following arguments are required: (.*)", message):
        needed = ", ".join(keys.get(key, key.upper()) for key in found[1].split(", "))
        return f"{name} needs {needed}, which was not given.{see}"
    if found := re.match(r"Option '([^']+)' is not accepted", message):
        return (
            f"The config file of {name} has the unknown key {found[1]!r}.{did_you_mean(found[1], keys)}{see}"
        )
    if found := re.search(r"(?s)key \"([^\"]+)\".*Option '([^']+)' is not accepted", message):
        return f"{name} was given the unknown key {found[2]!r} in {found[1]}.{see}"
    if found := re.match(r"Group '([^']+)' does not accept option '([^']+)'", message):
        return f"{name} was given the unknown key {found[2].partition('.')[0]!r} in {found[1]}.{see}"
    if found := re.search(r"File does not exist: (.*)", message):
        return f"The config file {found[1]} does not exist."
    if found := re.match(r'Parser key "([^"]+)"', message):
        given = re.findall(r"(?:Given value:|Got value:) (.*)", message)
        expected = re.findall(r"Expected an? (.*?)(?:\.? Got|\n|$)", message)
        if given and expected:
            key = keys.get(found[1], found[1])
            return f"{name} needs {key} to be {_kinds(expected)}, got {given[-1]!r}.{see}"
    return f"{name}: {' '.join(message.split()).rstrip('.')}.{see}"


def _kinds(expected: Sequence[str]) -> str:
    """Say in plain words which types or values the parser expected."""
    names = {"<class 'int'>": "a whole number", "<class 'float'>": "a number", "<class 'NoneType'>": ""}
    words = [
        names.get(kind, re.sub(r"<class '(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", kind))
        for kind in expected
    ]
    return " or ".join(dict.fromkeys(word.replace(", ", " or ") for word in words if word))


def _format_warning(message, category, filename, lineno, line=None) -> str:
    """Show a warning of vispe as one line, and others as Python does."""
    package = Path(__file__).resolve().parents[1]
    if Path(filename).resolve().is_relative_to(package) and issubclass(category, UserWarning):
        return f"vispe: warning: {' '.join(str(message).split())}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _is_extra(error: ModuleNotFoundError) -> bool:
    return (error.name or "vispe").partition(".")[0] != "vispe"


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, VispeError):
        return f"this needs the package {error.name!r}, which is not installed; run: pip install 'vispe[cli]'"
    if isinstance(error, OSError) and not isinstance(error, VispeError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    text = " ".join(str(error).split())
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )  # no terminal codes


def _fail(text: str, code: int) -> int:
    print(f"vispe: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
