"""Journal of an interruptible run: its arguments and its finished results.

`unfinished.jsonl` in the results folder has one line for the arguments of the run, one for the trained model and
one for each finished image, each written after the files it refers to. An incomplete last line is ignored.
The file is deleted when the run is complete.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.errors import InputError
from vispe.images.remote import StoreURL, fingerprint_url
from vispe.utils.files import MARK, check_no_link, jsonable, remove

NAME = "unfinished.jsonl"
_TEMPORARY = re.compile(rf"\.(.+){re.escape(MARK)}[0-9a-f]{{12}}(?:\.\w+)?", re.DOTALL)


def fingerprint_files(path: Path) -> str:
    """Return a fingerprint of a file or folder: names, sizes and times of all files, or URL and metadata."""
    if isinstance(path, StoreURL):
        return fingerprint_url(path)
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        status = file.stat()
        text = f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(text.encode(errors="replace"))
    return digest.hexdigest()


def to_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments after a round trip through JSON."""

    def fields(value: Any) -> Any:
        return vars(value) if dataclasses.is_dataclass(value) else str(value)

    return json.loads(json.dumps(arguments, default=fields))


class Journal:
    """Journal of a run; requires the lock of the folder.

    Args:
        out: folder of the results.
        arguments: all arguments that determine the results, from `to_json`.
        force: start from scratch, even if a journal exists.
        has_parts: whether the folder contains parts of an unfinished result of an image.

    Attributes:
        resumes: whether an unfinished run with equal arguments exists.
        model: SHA-256 of its model file; None before training.
        notes: notes of the run so far.

    Raises:
        InputError: an unfinished run with other arguments exists, and `force` is false.
    """

    def __init__(self, out: Path, arguments: dict[str, Any], force: bool, has_parts: bool = False) -> None:
        self.path, self._arguments = out / NAME, arguments
        self.model: str | None = None
        self.notes: list[str] = []
        self._records: dict[str, dict[str, Any]] = {}
        self._earlier, self._length = _read(self.path)
        header = self._earlier[0] if self._earlier else {}
        self.resumes = not force and header.get("asked") == arguments
        if self.resumes:
            for line in self._earlier[1:]:
                self._take(line)
        elif not force and self._earlier and (has_parts or len(self._earlier) > 1):
            changed = [
                key
                for key in {**arguments, **header["asked"]}
                if arguments.get(key) != header["asked"].get(key)
            ]
            raise InputError(
                f"{out} contains an unfinished run with other {', '.join(k.replace('_', ' ') for k in changed)}. "
                "Repeat that command to resume it, use force to start again, or choose another folder."
            )
        self._started = False

    @property
    def empty(self) -> bool:
        """Whether no image is finished."""
        return not self._records

    def start(self, targets: Sequence[Path]) -> None:
        """Prepare for writing results; from now on the run can be resumed.

        Temporary files of the targets are removed. Only the names of this run count: a journal is untrusted input,
        so files that it names are never removed.

        Args:
            targets: every file that this run may write.
        """
        if self._started:
            return
        self._started = True
        folder = self.path.parent
        beginnings = _beginnings(path.stem for path in targets)
        for path in list(folder.iterdir()):
            temporary = _TEMPORARY.fullmatch(path.name)
            if temporary and temporary[1] in beginnings:
                remove(path, folder)
        if self.resumes:
            with self.path.open("r+b") as stream:
                stream.truncate(self._length)
            return
        self.path.unlink(missing_ok=True)
        self._append({"asked": self._arguments})

    def remaining(self, targets: Sequence[Path]) -> list[str]:
        """Return the names of the results of an earlier unfinished run that this run does not replace."""
        if self.resumes:
            return []
        records = (line.get("record") for line in self._earlier[1:])
        files = (record.get("files") for record in records if isinstance(record, dict))
        names = {Path(str(f)).name for group in files if isinstance(group, dict) for f in group.values()}
        folder = self.path.parent
        return sorted(n for n in names - {t.name for t in targets} if (folder / n).is_file())

    def trained(self, digest: str, notes: Sequence[str]) -> None:
        """Record that the model file is complete."""
        self._append({"model": digest, "notes": list(notes)})

    def finished(self, image: Path, record: Mapping[str, Any], notes: Sequence[str]) -> None:
        """Record that an image and all its files are complete."""
        self._append({"image": str(image), "record": record, "notes": list(notes)})

    def record(self, image: Path) -> dict[str, Any] | None:
        """Return the record of a finished image if its files still exist."""
        record = self._records.get(str(image))
        if record is None:
            return None
        files = {kind: str(self.path.parent / Path(name).name) for kind, name in record["files"].items()}
        return {**record, "files": files} if all(map(os.path.exists, files.values())) else None

    def end(self) -> None:
        """Delete the journal of a complete run."""
        self.path.unlink(missing_ok=True)

    def discard(self, model: Path) -> None:
        """Discard a run without results: the journal and the model file are deleted."""
        if not self._started:
            return
        if self.model is not None and model.is_file() and digest(model) == self.model:
            model.unlink()
        self.end()

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(jsonable(line, "line"), allow_nan=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        self.model = line.get("model", self.model)
        self.notes = list(line.get("notes", self.notes))
        if "record" in line:
            self._records[line["image"]] = line["record"]


def _beginnings(stems: Iterable[str]) -> set[str]:
    """Return prefixes of the temporary names of files, and of the folders of their images."""
    return {part[:100] for stem in stems for part in (stem, stem.rpartition("_")[0])}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a journal, and their number of bytes."""
    lines, length = [], 0
    check_no_link(path)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return lines, length
    for raw in data.splitlines(keepends=True):
        try:
            line = json.loads(raw)
        except ValueError:
            break
        if not raw.endswith(b"\n") or not isinstance(line, dict) or (not lines and "asked" not in line):
            break
        lines.append(line)
        length += len(raw)
    return lines, length
