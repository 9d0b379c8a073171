"""Where each picture lies in a tar file: found once, and kept in a small JSON file."""

from __future__ import annotations

import glob
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vispe.errors import InputError
from vispe.files import atomic_path
from vispe.images.file_search import natural
from vispe.images.formats.decoded_image import SUFFIXES
from vispe.images.paths import expanded
from vispe.train.data.dataset import digest
from vispe.train.data.image_reading import STACKS, Reading, as_file, count_pages

VERSION = 1


@dataclass(frozen=True)
class Member:
    """An image file inside a tar file.

    Attributes:
        name: its path in there.
        offset: of its first byte in the tar file.
        size: in bytes.
        pages: pictures in it.
        damage: why it cannot be read; empty if it can, or if that was not tried.
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
    """Return the tar files that patterns name, each once.

    `{000..012}` counts, keeping leading zeros, `{a,b}` lists, and `*`, `?` and `[...]` match names that exist. What a
    glob matches is in natural order; everything else in the order given.

    Raises:
        InputError: a file is missing, a glob matches nothing, or an address on a network was given.
    """
    files: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str | Path) else patterns:
        if re.match(r"\w+://|pipe:", str(pattern)):
            raise InputError(
                f"tar={str(pattern)!r} is on a network; copy the files here and give their paths."
            )
        for one in _braces(str(expanded(pattern))):
            # a name may hold brackets itself; without any, glob finds the file of this name or nothing
            matches = [one] if Path(one).is_file() else glob.glob(one, recursive=True)  # noqa: PTH207 - absolute too
            if not matches or not (glob.has_magic(one) or Path(one).is_file()):
                raise InputError(f"the tar file {one} does not exist; check the name.")
            files |= dict.fromkeys(map(Path, sorted(matches, key=natural)))
    return list(files)


def _braces(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for, the first braces outermost."""
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
    reading = None if check is None else list(check.describe().values())
    file = index_file(path, cache)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    if valid.items() <= kept.items():
        members = [Member(**member) for member in kept["members"]]
        if check is None or kept["checked"] == reading:
            return members
    else:
        members = [_counted(path, member) for member in _scan(path)]
    if check is not None:
        members = [_checked(path, member, check) for member in members]
    values = {**valid, "checked": reading, "members": [asdict(member) for member in members]}
    try:
        with atomic_path(file, force=True) as temporary:
            temporary.write_text(json.dumps(values), encoding="utf-8")
    except (OSError, InputError) as error:
        raise InputError(
            f"the index {file} cannot be written ({error}); give a folder for it by cache=."
        ) from error
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
    """Return a member with its number of pages, 0 where its head is damaged."""
    if not member.name.lower().endswith(STACKS):
        return member
    try:
        with as_file(content(path, member), f"picture{STACKS[0]}") as file:
            return replace(member, pages=count_pages(file, f"{path}: {member.name}"))
    except InputError as error:
        return replace(member, pages=0, damage=str(error))


def _checked(path: Path, member: Member, reading: Reading) -> Member:
    """Return a member with the reason why it cannot be read, if there is one."""
    label, damage = f"{path}: {member.name}", ""
    try:
        count = len(reading.content(content(path, member), label))
        if not member.pages:
            damage = member.damage
        elif count != member.pages:
            damage = f"{label} holds {count} pages, and its head and ending say {member.pages}."
    except InputError as error:
        damage = str(error)
    return replace(member, damage=damage)
