"""Entry point of the `vispe` command: dispatch to subcommands, option parsing, one-line error messages.

Conventions for a command (each has its own module, which only calls the library):

- Command NAME is the function NAME in `vispe/cli/commands/*/NAME.py` (`_` for `-`), listed in `COMMANDS` below. Its
  module imports heavy packages inside the function, so that help stays fast. A name of two words (`plot positions`,
  with `_` for the space) has its own module, options and help.
- The signature is the interface: a parameter `img_size: int | None = None` is the option `--img-size`;
  without a default it is required. `bool = False` defines `--flag`, `bool = True` defines `--flag / --no-flag`;
  `list[...]` options are written `--scales 1,2,4` (or as a YAML list in the file of `--config`; values that contain
  commas as `'["a,b", "c"]'`; the name of an existing file is never split); `Literal` defines choices. `from_` is the
  option `--from`, which is a reserved word in Python.
- Module constant `POSITIONALS = ("images",)` lists the positional parameters, in order; one of type `list[...]`
  accepts any number of values (at least one if it has no default).
- Module constant `SHORT = {"out": "-o"}` defines one-letter options.
- Module constant `OPTIONAL_VALUE = {"cluster": "auto"}` defines the value of options that are written without one:
  `--cluster` means `--cluster auto`. The next argument is parsed as the value only if it is a number or equal to that
  default, so in `--cluster a.png` the file remains a positional argument.
- Module constant `MULTI_WORD = ("text",)` lists list options that consume all arguments up to the next option:
  `--text matrix precipitate`.
- Module constant `ADVANCED = ("scheduler",)` lists options that `--help` omits and `--help-all` shows.
- Module constant `UNAVAILABLE = {"features": ": the model decides."}` explains options that users may expect but that
  the command does not have; the text follows "NAME has no option '--features'".
- The Google docstring is the help: the first line, the text, `Args:`, and at the end `Examples:`. Options that several
  commands share are described in `vispe/cli/shared_options.py`; a docstring describes only those that differ.
- Results go to stdout, progress and warnings to stderr. Return `None` or 0 for success, else the exit code.
- Library messages name Python parameters in backticks (`` `pos_embed` ``); this module prints those of the command as
  its options (`--pos-embed`).
- `--config FILE`, `--print_config`, `--help-all`, `--debug`, `--allow-code` and `--allow-download` belong to this
  module; commands do not define them.
"""

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vispe.cli.arguments import read_options
from vispe.cli.messages import name_options
from vispe.cli.terminal import ignore_broken_pipe, one_line
from vispe.errors import OptionError, UnknownName, VispeError, did_you_mean, is_out_of_memory

COMMANDS: dict[str, str] = {
    "list": "List the positional encodings and the position schemes.",
    "info": "Show an encoding or a position scheme, its options and hosts; without a name, the hosts of all encodings.",
    "plot": "Plot the attention bias or similarity that an encoding produces around a query patch.",
    "plot positions": "Plot the coordinates that position schemes assign to text, images and videos.",
    "segment": "Segment micrographs from a few scribbles, without labels, or from text.",
    "apply": "Segment more images with a model trained by `vispe segment`.",
    "paint": "Draw scribbles in a browser window and watch the segmentation update.",
    "suggest": "Suggest where further scribbles on an image would help the classifier most.",
    "features": "Compute the outputs of the model of patch tokens once, for later segmentations of the same images.",
    "audit": "Audit the positional bias of a model: measures with controls and confidence intervals in one report.",
    "probe": "Measure how much position can be decoded from a model's features.",
    "rotate": "Measure how rotating, mirroring and shifting a sample changes a model's features or a segmentation.",
    "threecell": "Train small models on the three-cell benchmark and score which positional tasks they solve.",
    "health": "Report attention heads that collapse, stay local, or attend by position instead of content.",
    "receptive-field": "Measure how far a model looks: the pixels that its central feature depends on.",
    "debias": "Reduce the positional bias of a model without training.",
    "retrofit": "Remove positional bias from a pretrained vision transformer by distillation.",
    "retrofit evaluate": "Evaluate a retrofit: the model before and after, in one report.",
    "export-positions": "Export the position scheme of a vision-language model for an inference engine.",
    "convert-weights": "Rename the weights of a released checkpoint to vispe's names.",
    "bench": "Benchmark the attention backends for attention with a position bias on this machine.",
    "doctor": "Show the capabilities of this installation; with a model, the attention backend of each layer and why.",
    "cite": "Print how to cite vispe, and the papers of encodings, position schemes, measures and recipes.",
}

# command to module, from file names alone
MODULES = {
    file.stem: f"vispe.cli.commands.{file.parent.name}.{file.stem}"
    for file in Path(__file__).parent.glob("commands/*/[a-z]*.py")
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code.

    Args:
        argv: arguments after `vispe`; `None` uses `sys.argv`.

    Returns:
        0 on success, also if the reader of stdout was closed early; 2 after bad input (one line on stderr); 130
        after Ctrl-C; otherwise the return value of the command.
    """
    if argv is None:
        # objects of imported libraries live until the process ends: searching them for garbage takes half a second
        gc.freeze()
        # the command imports further libraries: fewer collections
        gc.set_threshold(100_000, 10, 10)
    with ignore_broken_pipe():
        code = _run(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        # the interpreter collects garbage before it exits, but the operating system frees the memory anyway
        gc.freeze()
    return code


def _run(words: list[str]) -> int:
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    original = warnings.formatwarning
    warnings.formatwarning = partial(_format_warning, words=words)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        if debug:
            raise
        return _fail("interrupted by Ctrl-C; files that were already finished are complete.", 130)
    except (VispeError, OSError, ModuleNotFoundError) as error:
        # a missing module of vispe itself is a bug, which needs the traceback
        ours = isinstance(error, ModuleNotFoundError) and (error.name or "vispe").partition(".")[0] == "vispe"
        if debug or ours:
            raise
        return _fail(_name_options(_sentence(error), words), 2)
    except (MemoryError, RuntimeError) as error:
        if debug or not is_out_of_memory(error):
            raise
        size = _sentence(error).rstrip(".") or "unknown size"
        return _fail(f"out of memory ({size}). Use fewer or smaller files, or close other programs.", 2)
    finally:
        warnings.formatwarning = original


def load_command(name: str) -> tuple[Callable[..., int | None], tuple[str, ...], dict[str, str]]:
    """Import the module of a command; return its function, positional parameters and short options.

    Raises:
        UnknownName: unknown command.
    """
    if name not in COMMANDS:
        raise UnknownName(
            f"unknown command {name!r}.{did_you_mean(name, COMMANDS)} "
            f"Available commands: {', '.join(COMMANDS)}."
        )
    function = name.replace("-", "_").replace(" ", "_")
    module = importlib.import_module(MODULES[function])
    return getattr(module, function), getattr(module, "POSITIONALS", ()), getattr(module, "SHORT", {})


def parse(name: str, words: Sequence[str]) -> tuple[Callable[..., int | None], dict[str, object]]:
    """Return the function of command `name` and its keyword arguments, parsed from `words`.

    Raises:
        UnknownName: unknown command.
        OptionError: an option is unknown, missing, or has a value of the wrong type.
        MissingExtra: jsonargparse is not installed.
    """
    function, positionals, short = load_command(name)
    return function, read_options(name, function, positionals, short, words)


def summary() -> str:
    """Return the text of `vispe --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: vispe COMMAND ...\n\n"
        "Positional encodings for vision and multimodal transformers: swap them by name, measure\n"
        "positional bias, and segment micrographs.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help  show this text; `vispe COMMAND --help` shows the options and examples of a command,\n"
        "              `vispe COMMAND --help-all` also those that are rarely needed\n"
        "  --version   print the version\n"
        "  --debug     show the traceback of an error\n"
        "  --allow-code, --allow-download\n"
        "              allow a recipe (--config), model file or card to run Python code or to download weights\n\n"
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
        raise OptionError(f"missing command before {words[0]}. Write the command first; see vispe --help.")
    from vispe.train.retrofit.recipe_files import recipe_permissions

    length = _command_length(words)
    with recipe_permissions(words[length:]) as rest:
        try:
            function, arguments = parse(" ".join(words[:length]), rest)
        except SystemExit as stop:  # raised by --help and --print_config
            return int(stop.code or 0)
        return function(**arguments) or 0


def _command_length(words: Sequence[str]) -> int:
    return 2 if " ".join(words[:2]) in COMMANDS else 1


def _name_options(text: str, words: Sequence[str]) -> str:
    """Replace backticked parameters of the command in `words` by its options."""
    name = " ".join(words[: _command_length(words)])
    if name not in COMMANDS:
        return text
    function, positionals, _ = load_command(name)
    return name_options(text, function, positionals)


def _format_warning(message, category, filename, lineno, line=None, words: Sequence[str] = ()) -> str:
    """Format warnings of vispe as one line, others as Python does."""
    package = Path(__file__).resolve().parents[1]
    if Path(filename).resolve().is_relative_to(package) and issubclass(category, UserWarning):
        return f"vispe: warning: {_name_options(' '.join(str(message).split()), words)}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, VispeError):
        return f"missing package {error.name!r}, which this command needs. Run: pip install 'vispe[cli]'"
    if isinstance(error, OSError) and not isinstance(error, VispeError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return one_line(" ".join(str(error).split()))


def _fail(text: str, code: int) -> int:
    print(f"vispe: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
