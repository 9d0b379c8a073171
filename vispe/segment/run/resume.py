"""A run on image files that can be stopped at any moment and goes on: what it was asked, and what is done already.

`unfinished.jsonl` in the folder of results has a line for what the run was asked to do, one for the trained model and
one for each finished image, each written after the files that it speaks of. A line that breaks off does not count.
The file is gone when the run is complete.
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
from vispe.files import MARK, check_no_link, jsonable, remove

NAME = "unfinished.jsonl"
_TEMPORARY = re.compile(rf"\.(.+){re.escape(MARK)}[0-9a-f]{{12}}(?:\.\w+)?", re.DOTALL)


def state_of(path: Path) -> str:
    """Return a fingerprint of a file or folder: names, sizes and times of change of all files."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        found = file.stat()
        text = f"{file.relative_to(path)}\0{found.st_size}\0{found.st_mtime_ns}\0"
        digest.update(text.encode(errors="replace"))
    return digest.hexdigest()


def plain(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run was asked to do as JSON gives it back."""

    def fields(value: Any) -> Any:
        return vars(value) if dataclasses.is_dataclass(value) else str(value)

    return json.loads(json.dumps(asked, default=fields))


class State:
    """What is done of a run; only the process that has claimed the folder may have one.

    Args:
        out: folder of the results.
        asked: everything that decides the results, from `plain`.
        force: begin anew, whatever is there.

    Attributes:
        goes_on: whether an unfinished run with the same `asked` is there.
        model: SHA-256 of its model file; None as long as there is none.
        notes: of the whole run, so far.

    Raises:
        InputError: an unfinished run that was asked for something else, and not `force`.
    """

    def __init__(self, out: Path, asked: dict[str, Any], force: bool) -> None:
        self.path, self._asked = out / NAME, asked
        self.model: str | None = None
        self.notes: list[str] = []
        self._records: dict[str, dict[str, Any]] = {}
        self._earlier, self._length = _read(self.path)
        begun = self._earlier[0] if self._earlier else {}
        self.goes_on = not force and begun.get("asked") == asked
        if self.goes_on:
            for line in self._earlier[1:]:
                self._take(line)
        elif not force and len(self._earlier) > 1:
            other = [key for key in {**asked, **begun["asked"]} if asked.get(key) != begun["asked"].get(key)]
            raise InputError(
                f"{out} holds an unfinished run with other {', '.join(k.replace('_', ' ') for k in other)}; repeat "
                "that command to go on, add --force to begin anew, or choose another folder."
            )
        self._started = False

    @property
    def empty(self) -> bool:
        """Whether no image is finished."""
        return not self._records

    def start(self, targets: Sequence[Path]) -> None:
        """Get ready to write results; from now on the run can be resumed.

        Temporary files of the targets are removed. Only the names of this run decide: the journal may come from
        anyone, so nothing that it names is removed.

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
        if self.goes_on:
            with self.path.open("r+b") as stream:
                stream.truncate(self._length)
            return
        self.path.unlink(missing_ok=True)
        self._append({"asked": self._asked})

    def remaining(self, targets: Sequence[Path]) -> list[str]:
        """Return the names of the results of an earlier unfinished run that this run does not replace."""
        if self.goes_on:
            return []
        records = (line.get("record") for line in self._earlier[1:])
        files = (record.get("files") for record in records if isinstance(record, dict))
        names = {Path(str(f)).name for group in files if isinstance(group, dict) for f in group.values()}
        folder = self.path.parent
        return sorted(n for n in names - {t.name for t in targets} if (folder / n).is_file())

    def trained(self, digest: str, notes: Sequence[str]) -> None:
        """The model file is complete."""
        self._append({"model": digest, "notes": list(notes)})

    def finished(self, image: Path, record: Mapping[str, Any], notes: Sequence[str]) -> None:
        """An image and all its files are complete."""
        self._append({"image": str(image), "record": record, "notes": list(notes)})

    def record(self, image: Path) -> dict[str, Any] | None:
        """Return the record of an image whose files are complete and still there."""
        found = self._records.get(str(image))
        if found is None:
            return None
        files = {kind: str(self.path.parent / Path(name).name) for kind, name in found["files"].items()}
        return {**found, "files": files} if all(map(os.path.isfile, files.values())) else None

    def end(self) -> None:
        """The run is complete."""
        self.path.unlink(missing_ok=True)

    def discard(self, model: Path) -> None:
        """Give up a run that has no results: what it has written goes, with its model file."""
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
    """Return what temporary names of files, and of the folders of their images, begin with."""
    return {part[:100] for stem in stems for part in (stem, stem.rpartition("_")[0])}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a file of this module, and how many bytes they are."""
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
