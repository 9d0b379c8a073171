"""Helpers shared by the commands: input and output files, model loading, progress bars and printing."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vispe.backbones.device import choose_device
from vispe.errors import InputError
from vispe.images.file_search import find_images
from vispe.utils.files import atomic_path, check_writable, write_json
from vispe.utils.report.html_page import Page

if TYPE_CHECKING:
    from vispe.evaluate.evaluated import EvaluatedModel


class Output:
    """Output files of a command, and its printed report.

    Args:
        folder: output folder; None writes no files.
        names: file names, in the order in which they are listed.
        force: overwrite existing files.
        protect: files that are never overwritten, such as the input images.

    Raises:
        InputError: a file exists and `force` is false, or it cannot be written.
    """

    def __init__(
        self, folder: str | None, names: Iterable[str], force: bool = False, protect: Sequence[Path] = ()
    ) -> None:
        self.files = [] if folder is None else [Path(folder, name) for name in names]
        self.force = force
        check_writable(self.files, force, protect=protect)

    def finish(
        self,
        json: bool,
        report: Any,
        text: Callable[[], str],
        contents: Callable[[], Mapping[str, Any]] = dict,
        indent: int = 2,
    ) -> None:
        """Write the files, print the report as JSON or text, and list the files on stderr.

        Args:
            json: print `report` as JSON instead of the text.
            report: JSON-serialisable values.
            text: callable without arguments that returns the printed text.
            contents: callable that returns the figure, HTML page or JSON values of each file by name; only called if
                there is an output folder.
            indent: indentation of the printed JSON.
        """
        by_name = contents() if self.files else {}
        for file in self.files:
            if file.name in by_name:
                write(file, by_name[file.name], self.force)
        print(dumps(report, indent=indent, allow_nan=False) if json else text())
        if self.files:
            print(f"written: {', '.join(map(str, self.files))}", file=sys.stderr)


def write(file: Path, content: Any, force: bool = False) -> None:
    """Write an HTML page, a figure in the format of the file suffix, or JSON values.

    Raises:
        InputError: matplotlib cannot write the suffix of a figure.
    """
    if isinstance(content, Page):
        content.write(file, force)
    elif isinstance(content, Mapping):
        write_json(file, content, force)
    else:
        suffix, supported = file.suffix[1:].lower(), content.canvas.get_supported_filetypes()
        if suffix not in supported:
            raise InputError(f"{file}: unsupported figure format. Use one of {', '.join(sorted(supported))}.")
        with atomic_path(file, force) as temporary:
            content.savefig(temporary, format=suffix)


def find(patterns: Sequence[str] | None) -> list[Path]:
    """Return the image files that match the patterns of an option; an empty list if it is unset."""
    return find_images(patterns) if patterns else []


def versions() -> dict[str, str]:
    """Return the package versions that every report records."""
    import timm
    import torch

    from vispe.utils.version import __version__

    return {"vispe": __version__, "torch": torch.__version__, "timm": timm.__version__}


def load(
    model: str, pos_embed: str | None, weights: str | None, img_size: int | None, device: str, seed: int,
    **inputs: Any,
) -> tuple["EvaluatedModel", dict[str, Any]]:  # fmt: skip
    """Return the evaluated model, as loaded by `load_evaluated_model`, and the first entries of its report.

    Args:
        model: model name as written by the user.
        pos_embed: see `load_evaluated_model`.
        weights: see `load_evaluated_model`.
        img_size: see `load_evaluated_model`.
        device: 'auto', 'cpu', 'cuda', 'cuda:1' ...
        seed: seed of random weights.
        **inputs: further entries of the report, such as the names of the images.
    """
    from vispe.evaluate.evaluated import load_evaluated_model

    device = choose_device(device)
    options = {
        "pos_embed": pos_embed,
        "weights": weights,
        "img_size": img_size,
        "seed": seed,
        "device": device,
    }
    entries = {"model": model, "pos_embed": pos_embed, "weights": weights or "pretrained", **inputs}
    return load_evaluated_model(model, **options), entries | {
        "seed": seed,
        "device": device,
        "versions": versions(),
    }


def section(title: str, result: Any) -> str:
    """Return a result as text: title and verdict, notes, and a Markdown table."""
    notes = "".join(f"  {note}\n" for note in result.notes)
    return f"{title}: {result.verdict}\n{notes}\n{result.to_markdown()}\n"


def progress(*columns: Any, show: bool = True) -> Progress:
    """Return a progress bar on stderr with the remaining time; hidden if stderr is not a terminal."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(),
        console=console, transient=True, disable=not (show and console.is_terminal), redirect_stdout=False,
    )  # fmt: skip


@contextmanager
def progress_bar(description: str, show: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar; yield a callback `(description, completed fraction)` that updates it."""
    with progress(show=show) as bar:
        task = bar.add_task(description, total=1.0)
        yield lambda description, fraction: bar.update(task, description=description, completed=fraction)
