"""Where each picture lies in a tar file: found once, and kept in a small JSON file."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vispe.errors import InputError
from vispe.images.find import natural
from vispe.images.formats.decoded import SUFFIXES
from vispe.images.paths import expanded
from vispe.train.data.reading import STACKS, Reading, count_pages
from vispe.train.data.source import digest

VERSION = 1


@dataclass(frozen=True)
class Member:
    """An image file inside a tar file.

    Attributes:
        name: its path in there.
        offset: of its first byte in the tar file.
        size: in bytes.
        pages: pictures in it.
        damage: why it cannot be read; empty if it can, or if nobody has tried.
    """

    name: str
    offset: int
    size: int
    pages: int = 1
    damage: str = ""

    @property
    def sample(self) -> str:
        """Name up to the first dot of its last part: what the files of a sample share."""
        folder, slash, last = self.name.rpartition("/")
        return folder + slash + last.partition(".")[0]

    @property
    def extension(self) -> str:
        """What follows the first dot of the last part of the name, in lower case."""
        return self.name.rpartition("/")[2].partition(".")[2].lower()


def expand(patterns: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the tar files that patterns name.

    `{000..012}` counts, keeping leading zeros, `{a,b}` lists, and `*`, `?` and `[...]` match names that exist. What a
    glob matches is in natural order; everything else in the order given. A file that comes twice is taken once.

    Raises:
        InputError: a file is missing, a glob matches nothing, or an address on a network was given.
    """
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str | Path) else patterns:
        if re.match(r"\w+://|pipe:", str(pattern)):
            raise InputError(
                f"tar={str(pattern)!r} is on a network; copy the files here and give their paths."
            )
        for one in _braces(str(expanded(pattern))):
            if Path(one).is_file():
                matches = [one]
            elif glob.has_magic(one):
                matches = sorted(glob.glob(one, recursive=True), key=natural)  # noqa: PTH207 - also absolute ones
            else:
                matches = []
            if not matches:
                raise InputError(f"the tar file {one} does not exist; check the name.")
            found.update(dict.fromkeys(map(Path, matches)))
    return list(found)


def _braces(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    items = match[1].split(",")
    if ends := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        padded = any(len(n) > 1 and n[0] == "0" for n in ends.groups())
        width = max(map(len, ends.groups())) if padded else 0
        items = [str(n).zfill(width) for n in range(int(ends[1]), int(ends[2]) + 1)]
    if not items:
        raise InputError(f"the range {match[0]} of {pattern!r} is empty; give the smaller number first.")
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [each for item in items for each in _braces(head + item + tail)]


def indexed(path: Path, cache: Path | None, check: Reading | None) -> list[Member]:
    """Return the image files of a tar file in stored order, from its index if there is a valid one.

    The index is valid while size and time of change of the tar file are those that it was made for.

    Args:
        path: of an uncompressed tar file.
        cache: folder that the index is kept in; None keeps it beside the tar file, as `<name>.index.json`.
        check: read every picture, so that `damage` is known of all; None leaves out what has not been read before.

    Raises:
        InputError: not an uncompressed tar file, damaged, or the index cannot be written.
    """
    state = path.stat()
    valid = {"version": VERSION, "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    file = index_file(path, cache)
    how = None if check is None else list(check.describe().values())
    kept = _load(file)
    members = [Member(**m) for m in kept["members"]] if valid.items() <= kept.items() else None
    if members is not None and (check is None or kept["checked"] == how):
        return members
    if members is None:
        members = [_counted(path, m) for m in _scan(path)]
    if check is not None:
        members = [_checked(path, m, check) for m in members]
    _save(file, {**valid, "checked": how, "members": [asdict(m) for m in members]})
    return members


def index_file(path: Path, cache: Path | None) -> Path:
    """Return the path of the index of a tar file."""
    if cache is None:
        return path.with_name(path.name + ".index.json")
    return cache / f"{path.name}-{digest(str(path.resolve()))[:12]}.index.json"


def content(path: Path, member: Member) -> bytes:
    """Return the bytes of a member.

    Raises:
        InputError: the tar file ends before.
    """
    with path.open("rb") as tar:
        tar.seek(member.offset)
        data = tar.read(member.size)
    if len(data) != member.size:
        raise InputError(f"{path} is truncated in {member.name}; copy it again.")
    return data


def _scan(path: Path) -> list[Member]:
    try:
        with tarfile.open(path, "r:") as tar:
            return [
                Member(info.name, info.offset_data, info.size)
                for info in tar
                if info.isreg()
                and not info.issparse()
                and info.name.lower().endswith(SUFFIXES)
                and not info.name.rpartition("/")[2].startswith(".")
            ]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InputError(
            f"{path} is not a tar file that can be read in any order ({error}); give uncompressed, complete ones."
        ) from error


def _counted(path: Path, member: Member) -> Member:
    if not member.name.lower().endswith(STACKS):
        return member
    with tempfile.TemporaryDirectory(prefix="vispe-") as folder:
        file = Path(folder) / f"picture{STACKS[0]}"
        try:
            file.write_bytes(content(path, member))
            pages = count_pages(file, f"{path}: {member.name}")
        except InputError as error:
            return Member(member.name, member.offset, member.size, 0, str(error))
    return Member(member.name, member.offset, member.size, pages)


def _checked(path: Path, member: Member, reading: Reading) -> Member:
    damage = ""
    try:
        found = len(reading.content(content(path, member), f"{path}: {member.name}"))
        if found != member.pages and member.pages:
            damage = f"{path}: {member.name} holds {found} pages, and its head and ending say {member.pages}."
    except InputError as error:
        damage = str(error)
    if not member.pages:
        damage = damage or member.damage
    return Member(member.name, member.offset, member.size, member.pages, damage)


def _load(file: Path) -> dict:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _save(file: Path, content: dict) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=file.name, suffix=".part", dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(content, out)
        os.replace(name, file)  # noqa: PTH105 - so that several processes may do this at once
    except OSError as error:
        raise InputError(
            f"the index {file} cannot be written ({error.strerror}); give a folder for it by cache=."
        ) from error
