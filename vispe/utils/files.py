"""Atomic writing of result files without overwriting, and JSON and CSV output."""

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
"""Part of the names of temporary files, which can be deleted if a process was killed."""


@contextmanager
def atomic_path(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; rename it on success, delete it on failure.

    The folder is created if necessary. A killed process never leaves a partial `path`, at most a hidden file whose name
    contains `MARK`.

    Raises:
        InputError: `path` exists and not `force`, or its folder is not writable.
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
        protect: files that are never replaced, even with `force`, such as the inputs.

    Raises:
        InputError: two outputs have the same name, a target exists, is a folder or an input, or a folder is not
            writable.
    """
    targets = [Path(p) for p in paths]
    # os.path.realpath, since Path.resolve raises for circular links
    resolved = [Path(os.path.realpath(p)) for p in targets]
    inputs = {Path(os.path.realpath(p)) for p in protect}
    unique: set[Path] = set()
    for path, real in zip(targets, resolved, strict=True):
        if real in unique:
            raise InputError(
                f"two outputs have the same name {path}. Rename an input or use separate folders."
            )
        unique.add(real)
        if real in inputs:
            raise InputError(f"{path} is an input and would be overwritten. Choose another output folder.")
        if path.is_dir():
            raise InputError(
                f"{path} is a folder, so no file of this name can be written. Choose another name."
            )
        folder = next(p for p in real.parents if p.exists())
        if not folder.is_dir():
            raise InputError(f"{path} cannot be written: {folder} is not a folder.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{path} cannot be written: no permission to write in {folder}.")
    existing = [p for p in targets if os.path.lexists(p)]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        names = ", ".join(str(p) for p in existing[:5]) + (
            f" and {len(existing) - 5} more" if len(existing) > 5 else ""
        )
        raise InputError(
            f"{names} {verb}; add --force to overwrite {'it' if len(existing) == 1 else 'them'}."
        )


def remove(path: Path, folder: Path) -> None:
    """Remove a file or directory tree of vispe from `folder`; for a link, the link itself and not its target.

    Args:
        path: a direct entry of `folder`, which may be missing. Callers must derive it from their own inputs, never from
            the content of a file, and must have checked that vispe wrote it.
        folder: output folder.

    Raises:
        InputError: `path` is not a direct entry of `folder`.
    """
    if path.parent != folder or path.name in ("", ".", ".."):
        raise InputError(
            f"{path} is not an entry of {folder} and is not removed. Choose another output folder."
        )
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_no_link(path: Path) -> None:
    """Check that a path is not a symbolic link before vispe appends to it or removes it.

    Raises:
        InputError: `path` is a symbolic link.
    """
    if path.is_symlink():
        raise InputError(f"{path} is a link, which vispe does not write to. Remove the link.")


def write_json(path: str | Path, obj: Any, force: bool = False) -> Path:
    """Write JSON (UTF-8, indented by 2, keys in insertion order); NumPy values and paths are converted.

    Raises:
        InputError: `obj` contains NaN, infinity or an unsupported object; the message names its path in `obj`.
    """
    text = json.dumps(jsonable(obj, "value"), indent=2, ensure_ascii=False, allow_nan=False)
    path = Path(path)
    with atomic_path(path, force) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    return path


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], force: bool = False) -> Path:
    """Write a CSV file with a header and one line per record.

    Columns are the keys in order of first appearance; nested dicts become 'outer.inner'; None and missing values are
    empty; text is escaped by `csv_cell`.

    Raises:
        InputError: there are no records, or a value is NaN, infinite or a list.
    """
    if not rows:
        raise InputError(f"{path}: no records to write, got rows=[].")
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
    """Rename `temporary` to `path` without overwriting.

    Raises:
        InputError: `path` exists. Race-free only on file systems with hard links.
    """
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise InputError(f"{path} exists; add --force to overwrite it.") from error
    # file system without hard links
    except OSError:
        check_writable([path])
        temporary.replace(path)


def jsonable(obj: Any, where: str) -> Any:
    """Return `obj` converted to dicts, lists, text, finite numbers, bool and None.

    Args:
        obj: value to convert.
        where: path of the value, for messages.

    Raises:
        InputError: a value cannot be converted; the message names its path.
    """
    if obj is None or isinstance(obj, bool | str | int):
        return obj
    if isinstance(obj, np.generic):
        return jsonable(obj.item(), where)
    if isinstance(obj, float):
        if not np.isfinite(obj):
            raise InputError(f"{where} must be finite, got {obj}. Omit it or use None.")
        return obj
    if isinstance(obj, Path):
        return str(obj)
    if isinstance(obj, Mapping):
        return {str(key): jsonable(value, f"{where}.{key}") for key, value in obj.items()}
    if isinstance(obj, np.ndarray):
        return jsonable(obj.tolist(), where)
    if isinstance(obj, Sequence):
        return [jsonable(value, f"{where}[{i}]") for i, value in enumerate(obj)]
    raise InputError(f"{where} cannot be written as JSON or CSV, got {type(obj).__name__}.")


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file; text that spreadsheets would execute as a formula gets a leading apostrophe.

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
            raise InputError(f"Column {prefix}{key} needs one value per cell, got a list.")
        else:
            out[prefix + key] = value
    return out
