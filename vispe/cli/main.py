"""The command `vispe`: finds the subcommand, reads its options, turns errors into one line.

Convention for a command (each lives in its own module and has no logic beyond calling the library):

- Command NAME is the function NAME in `vispe/cli/commands/NAME.py` (`_` for `-`), listed in `COMMANDS` below. Its
  module imports heavy packages inside the function, so that help stays quick. A name of two words (`plot positions`,
  with `_` for the space) has a module, options and help of its own.
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
- Module constant `ELSEWHERE = {"features": ": the model decides."}` explains options that users may expect, but that
  the command does not have: what follows "NAME has no option '--features'".
- The Google docstring is the help: the first line, the text, `Args:`, and at the end `Examples:`.
- Results go to stdout, progress and warnings to stderr. Return `None` or 0 for success, else the exit code.
- `--config FILE`, `--print_config`, `--debug`, `--allow-code` and `--allow-download` belong to this module; commands
  do not define them.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from vispe.cli.arguments import read_options
from vispe.cli.terminal import one_line, outlasting_readers
from vispe.errors import OptionError, UnknownName, VispeError, did_you_mean, is_memory

COMMANDS: dict[str, str] = {
    "list": "List the positional encodings and the position schemes.",
    "info": "Show an encoding or a position scheme, its options and hosts; without a name, the hosts of all encodings.",
    "plot": "Draw what an encoding adds to attention around a query patch.",
    "plot positions": "Draw the coordinates that position schemes give text, images and videos.",
    "segment": "Segment micrographs from a few scribbles, from no labels, or from words.",
    "apply": "Segment more images with a model that `vispe segment` wrote.",
    "paint": "Paint strokes in a browser window and see the segmentation follow.",
    "suggest": "Show where the next strokes on an image would teach most.",
    "audit": "Say what positions do to a model: measures with controls and intervals, on one page.",
    "probe": "Measure how much position a model's features reveal.",
    "rotate": "Measure what turning, mirroring and shifting a sample changes in a model's features or a segmentation.",
    "threecell": "Train small models on the three-cell benchmark and score what their encodings can tell.",
    "health": "Report which attention heads of a model collapse, stay local, or look at places instead of things.",
    "retrofit": "Remove positional bias from a pretrained vision transformer by distillation.",
    "retrofit evaluate": "Measure what a retrofit took and what it left: before and after, on one page.",
    "export-positions": "Write the position scheme of a vision-language model for an engine that serves it.",
    "convert-weights": "Rename the weights of a released checkpoint to vispe's names.",
    "bench": "Measure on this machine which backend is the fastest for attention with a position bias.",
    "doctor": "Show what this installation has; with a model, which attention path its layers take and why.",
    "cite": "Print how to cite vispe, the encodings and the position schemes.",
}


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
        ours = isinstance(error, ModuleNotFoundError) and (error.name or "vispe").partition(".")[0] == "vispe"
        if debug or ours:
            raise
        return _fail(_sentence(error), 2)
    except (MemoryError, RuntimeError) as error:
        if debug or not is_memory(error):
            raise
        size = _sentence(error).rstrip(".") or "no size given"
        return _fail(f"memory ran out ({size}); give fewer or smaller files, or close other programs.", 2)
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
    function, positionals, short = load_command(name)
    return function, read_options(name, function, positionals, short, words)


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
        "  --debug     show the traceback of an error\n"
        "  --allow-code, --allow-download\n"
        "              let a recipe (--config), model file or card run Python code, or fetch weights, that it names\n\n"
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
    from vispe.train.retrofit.recipe_files import as_permitted

    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    with as_permitted(words[length:]) as rest:
        try:
            function, arguments = parse(" ".join(words[:length]), rest)
        except SystemExit as stop:  # --help and --print_config end here
            return int(stop.code or 0)
        return function(**arguments) or 0


def _format_warning(message, category, filename, lineno, line=None) -> str:
    """Show a warning of vispe as one line, and others as Python does."""
    package = Path(__file__).resolve().parents[1]
    if Path(filename).resolve().is_relative_to(package) and issubclass(category, UserWarning):
        return f"vispe: warning: {' '.join(str(message).split())}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, VispeError):
        return f"this needs the package {error.name!r}, which is not installed; run: pip install 'vispe[cli]'"
    if isinstance(error, OSError) and not isinstance(error, VispeError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return one_line(" ".join(str(error).split()))


def _fail(text: str, code: int) -> int:
    print(f"vispe: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
