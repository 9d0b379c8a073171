"""What commands have in common: the files they find and write, the model they build, progress and printing."""

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
from vispe.files import atomic_path, check_writable, write_json
from vispe.images.file_search import find_images
from vispe.report.html_page import Page

if TYPE_CHECKING:
    from vispe.evaluate.evaluated import Subject


class Output:
    """The files of a command in a folder, and what it prints.

    Args:
        folder: where the files go; None writes none.
        names: of the files, in the order in which they are listed.
        force: replace existing files.
        protect: files that are never replaced, such as the images.

    Raises:
        InputError: a file exists, or cannot be written.
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
        """Write files, print the report as JSON or text, and name the files on stderr.

        Args:
            json: print the report and not the text.
            report: JSON values.
            text: called without arguments, gives what is printed.
            contents: called where there is a folder; the figure, page or JSON values of each file by name.
            indent: spaces of the printed JSON.
        """
        by_name = contents() if self.files else {}
        for file in self.files:
            if file.name in by_name:
                write(file, by_name[file.name], self.force)
        print(dumps(report, indent=indent, allow_nan=False) if json else text())
        if self.files:
            print(f"written: {', '.join(map(str, self.files))}", file=sys.stderr)


def write(file: Path, content: Any, force: bool = False) -> None:
    """Write a page, a figure in the format that the ending of the file names, or JSON values."""
    if isinstance(content, Page):
        content.write(file, force)
    elif isinstance(content, Mapping):
        write_json(file, content, force)
    else:
        kind, known = file.suffix[1:].lower(), content.canvas.get_supported_filetypes()
        if kind not in known:
            raise InputError(f"{file} has no ending of a picture; use one of {', '.join(sorted(known))}.")
        with atomic_path(file, force) as temporary:
            content.savefig(temporary, format=kind)


def find(patterns: Sequence[str] | None) -> list[Path]:
    """Return the image files of an option, none where it was not given."""
    return find_images(patterns) if patterns else []


def versions() -> dict[str, str]:
    """Return the versions that every report names."""
    import timm
    import torch

    from vispe.version import __version__

    return {"vispe": __version__, "torch": torch.__version__, "timm": timm.__version__}


def load(
    model: str, pos_embed: str | None, weights: str | None, img_size: int | None, device: str, seed: int,
    **inputs: Any,
) -> tuple["Subject", dict[str, Any]]:  # fmt: skip
    """Return what is measured, as `load_subject` finds it, and the entries with which its report begins.

    Args:
        model: as users write it.
        pos_embed: of `load_subject`, as the rest.
        weights: likewise.
        img_size: likewise.
        device: 'auto', 'cpu', 'cuda', 'cuda:1' ...
        seed: of random weights.
        **inputs: further entries, such as the names of the images.
    """
    from vispe.evaluate.evaluated import load_subject

    place = choose_device(device)
    built = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "seed": seed, "device": place}
    entries = {"model": model, "pos_embed": pos_embed, "weights": weights or "pretrained", **inputs}
    return load_subject(model, **built), entries | {"seed": seed, "device": place, "versions": versions()}


def section(title: str, result: Any) -> str:
    """Return what was measured as text: the verdict after a title, notes and a table."""
    notes = "".join(f"  {note}\n" for note in result.notes)
    return f"{title}: {result.verdict}\n{notes}\n{result.to_markdown()}\n"


def progress(*columns: Any, show: bool = True) -> Progress:
    """Return a bar on stderr with the time left, drawn on a terminal only."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(),
        console=console, transient=True, disable=not (show and console.is_terminal), redirect_stdout=False,
    )  # fmt: skip


@contextmanager
def share_done(words: str, show: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Give a function that is called with what is being done and the share of all work that is finished."""
    with progress(show=show) as bar:
        task = bar.add_task(words, total=1.0)
        yield lambda description, share: bar.update(task, description=description, completed=share)
