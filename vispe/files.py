"""Files of results: written whole or not at all, never over others; JSON and CSV."""

from __future__ import annotations

import csv
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError

MARK = ".partial-"
"""Part of the name of unfinished files; what is left of them after a kill can be deleted."""


@contextmanager
def atomic_path(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it on success, remove it on any failure.

    The folder is made if needed.  A process that is killed leaves no half-written `path`, at most a hidden
    file whose name contains `MARK`.

    Raises:
        InputError: `path` exists and not `force`, or its folder cannot be written.
    """
    path = Path(path)
    check_writable([path], force)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem[:100]}{MARK}{uuid.uuid4().hex[:12]}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        if force:
            temporary.replace(path)
        else:
            rename_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(
    paths: Sequence[str | Path], force: bool = False, *, protect: Sequence[str | Path] = ()
) -> None:
    """Check all output files before any work starts.

    Args:
        paths: every file that will be written.
        force: whether existing files may be replaced.
        protect: files that are never replaced, such as the inputs, not even with `force`.

    Raises:
        InputError: two outputs of one name, a target that exists or is a folder or an input, or a folder that
            cannot be written.
    """
    targets = [Path(p) for p in paths]
    resolved = [Path(os.path.realpath(p)) for p in targets]  # unlike Path.resolve, also of links in a circle
    inputs = {Path(os.path.realpath(p)) for p in protect}
    seen: set[Path] = set()
    for path, real in zip(targets, resolved, strict=True):
        if real in seen:
            raise InputError(
                f"two outputs have the same name {path}; rename an input or use separate folders."
            )
        seen.add(real)
        if real in inputs:
            raise InputError(f"{path} is an input and would be overwritten; choose another output folder.")
        if path.is_dir():
            raise InputError(
                f"{path} is a folder, but a file of this name is to be written; choose another name."
            )
        folder = next(p for p in real.parents if p.exists())
        if not folder.is_dir():
            raise InputError(f"{path} cannot be written: {folder} is not a folder.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{path} cannot be written: no permission to write in {folder}.")
    existing = [p for p in targets if os.path.lexists(p)]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        shown = ", ".join(str(p) for p in existing[:5]) + (
            f" and {len(existing) - 5} more" if len(existing) > 5 else ""
        )
        raise InputError(
            f"{shown} {verb}; add --force to overwrite {'it' if len(existing) == 1 else 'them'}."
        )


def remove(path: Path, folder: Path) -> None:
    """Remove a file or a folder tree of vispe from `folder`; a link is removed itself, never its target.

    Args:
        path: a direct entry of `folder`, which may be missing. The caller names it from its own inputs, never from
            the content of a file, and has checked that vispe wrote it.
        folder: output folder.

    Raises:
        InputError: `path` is not a direct entry of `folder`.
    """
    if path.parent != folder or path.name in ("", ".", ".."):
        raise InputError(
            f"{path} is not an entry of {folder} and is not removed; choose another output folder."
        )
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_no_link(path: Path) -> None:
    """Check that vispe may append to a file, or remove a folder: the path is not a symbolic link.

    Raises:
        InputError: `path` is a link.
    """
    if path.is_symlink():
        raise InputError(f"{path} is a link, and vispe writes its own files only; remove the link.")


def write_json(path: str | Path, obj: Any, force: bool = False) -> Path:
    """Write JSON (UTF-8, two spaces, keys in the order given); NumPy values and paths become plain ones.

    Raises:
        InputError: NaN, infinity or an object that JSON cannot say; its place in `obj` is named.
    """
    text = json.dumps(jsonable(obj, "value"), indent=2, ensure_ascii=False, allow_nan=False)
    path = Path(path)
    with atomic_path(path, force) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    return path


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], force: bool = False) -> Path:
    """Write one line per row under a header.

    Columns are the keys in order of first appearance; nested dicts become 'outer.inner'; None and absent are
    empty; texts are those of `csv_cell`.

    Raises:
        InputError: NaN, infinity or lists; no rows at all.
    """
    if not rows:
        raise InputError(f"{path}: there are no rows to write.")
    flat = [_flat(jsonable(row, f"row {i}")) for i, row in enumerate(rows)]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    path = Path(path)
    with (
        atomic_path(path, force) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as stream,
    ):
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writerow({column: csv_cell(column) for column in columns})
        writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in flat)
    return path


def rename_new(temporary: Path, path: Path) -> None:
    """Rename, or raise InputError if `path` has appeared meanwhile, where the file system can tell."""
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise InputError(f"{path} exists; add --force to overwrite it.") from error
    except OSError:  # no hard links here
        check_writable([path])
        temporary.replace(path)


def jsonable(obj: Any, where: str) -> Any:
    """Return only dicts, lists, text, finite numbers, bool and None; InputError names the place of anything else."""
    if obj is None or isinstance(obj, bool | str | int):
        return obj
    if isinstance(obj, np.generic):
        return jsonable(obj.item(), where)
    if isinstance(obj, float):
        if not np.isfinite(obj):
            raise InputError(f"{where} is {obj}, which a report cannot hold; leave it out or use None.")
        return obj
    if isinstance(obj, Path):
        return str(obj)
    if isinstance(obj, Mapping):
        return {str(key): jsonable(value, f"{where}.{key}") for key, value in obj.items()}
    if isinstance(obj, np.ndarray):
        return jsonable(obj.tolist(), where)
    if isinstance(obj, Sequence):
        return [jsonable(value, f"{where}[{i}]") for i, value in enumerate(obj)]
    raise InputError(f"{where} is a {type(obj).__name__}, which a report cannot hold.")


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file: a text that spreadsheets would run as a formula gets a leading apostrophe.

    >>> csv_cell("=1+1"), csv_cell("-phase"), csv_cell("-1.5"), csv_cell(-1.5)
    ("'=1+1", "'-phase", '-1.5', -1.5)
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            raise InputError(f"the column {prefix}{key} holds a list; a table cell holds one value.")
        else:
            out[prefix + key] = value
    return out
