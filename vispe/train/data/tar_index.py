"""Index of the images in a tar file, stored as a JSON file."""

from __future__ import annotations

import glob
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vispe.errors import InputError, counted
from vispe.images.file_search import natural
from vispe.images.formats.decoded_image import SUFFIXES
from vispe.images.paths import expanded
from vispe.train.data.dataset import digest
from vispe.train.data.image_reading import STACKS, Reading, as_file, count_pages
from vispe.utils.files import atomic_path

VERSION = 1


@dataclass(frozen=True)
class Member:
    """Image file inside a tar file.

    Attributes:
        name: path in the tar file.
        offset: offset of its first byte in the tar file.
        size: size in bytes.
        pages: number of pages.
        damage: reason why it cannot be read; empty if it is readable or unchecked.
    """

    name: str
    offset: int
    size: int
    pages: int = 1
    damage: str = ""

    @property
    def sample(self) -> str:
        """Sample key: the path up to the first dot of the file name."""
        folder, slash, last = self.name.rpartition("/")
        return folder + slash + last.partition(".")[0]

    @property
    def extension(self) -> str:
        """Lower-case extension after the first dot of the file name."""
        return self.name.rpartition("/")[2].partition(".")[2].lower()


def expand(patterns: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the tar files of a list of patterns, without duplicates.

    `{000..012}` expands to numbers with leading zeros, `{a,b}` to alternatives, and `*`, `?` and `[...]` match existing
    names. Matches of a glob are in natural order, everything else is in the order of the patterns.

    Raises:
        InputError: a file does not exist, a glob matches nothing, or a pattern is a URL.
    """
    files: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str | Path) else patterns:
        if re.match(r"\w+://|pipe:", str(pattern)):
            raise InputError(
                f"tar must be local files, got {str(pattern)!r}. Copy the files and pass their paths."
            )
        for name in _braces(str(expanded(pattern))):
            # a file name may contain brackets itself
            matches = [name] if Path(name).is_file() else glob.glob(name, recursive=True)  # noqa: PTH207 - absolute too
            if not matches or not (glob.has_magic(name) or Path(name).is_file()):
                raise InputError(f"the tar file {name} does not exist. Check the name.")
            files |= dict.fromkeys(map(Path, sorted(matches, key=natural)))
    return list(files)


def _braces(pattern: str) -> list[str]:
    """Return the brace expansion of a pattern; the first braces vary slowest."""
    match = re.search(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    items = match[1].split(",")
    if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        padded = any(len(n) > 1 and n[0] == "0" for n in bounds.groups())
        width = max(map(len, bounds.groups())) if padded else 0
        items = [str(n).zfill(width) for n in range(int(bounds[1]), int(bounds[2]) + 1)]
    if not items:
        raise InputError(f"the range {match[0]} of {pattern!r} is empty. Write the smaller number first.")
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [each for item in items for each in _braces(head + item + tail)]


def load_index(path: Path, cache: Path | None, check: Reading | None) -> list[Member]:
    """Return the image files of a tar file in stored order, from its index if there is a valid one.

    The index is valid while size and modification time of the tar file are unchanged.

    Args:
        path: an uncompressed tar file.
        cache: folder of the index; None stores it next to the tar file, as `<name>.index.json`.
        check: reading options with which every image is read to detect damage; None skips the check.

    Raises:
        InputError: the file is damaged or not an uncompressed tar file, or the index cannot be written.
    """
    state = path.stat()
    valid = {"version": VERSION, "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    reading = None if check is None else list(check.describe().values())
    file = index_file(path, cache)
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = {}
    if valid.items() <= stored.items():
        members = [Member(**member) for member in stored["members"]]
        if check is None or stored["checked"] == reading:
            return members
    else:
        members = [_with_page_count(path, member) for member in _scan(path)]
    if check is not None:
        members = [_with_damage(path, member, check) for member in members]
    values = {**valid, "checked": reading, "members": [asdict(member) for member in members]}
    try:
        with atomic_path(file, force=True) as temporary:
            temporary.write_text(json.dumps(values), encoding="utf-8")
    except (OSError, InputError) as error:
        raise InputError(f"the index {file} cannot be written ({error}). Set another `cache`.") from error
    return members


def index_file(path: Path, cache: Path | None) -> Path:
    """Return the path of the index of a tar file."""
    if cache is None:
        return path.with_name(path.name + ".index.json")
    return cache / f"{path.name}-{digest(str(path.resolve()))[:12]}.index.json"


def content(path: Path, member: Member) -> bytes:
    """Return the bytes of a member.

    Raises:
        InputError: the tar file is truncated.
    """
    with path.open("rb") as tar:
        tar.seek(member.offset)
        data = tar.read(member.size)
    if len(data) != member.size:
        raise InputError(f"{path} is truncated in {member.name}. Copy it again.")
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
            f"{path} is not a tar file with random access ({error}). Use uncompressed, complete tar files."
        ) from error


def _with_page_count(path: Path, member: Member) -> Member:
    """Return a member with its number of pages, 0 if its header is damaged."""
    if not member.name.lower().endswith(STACKS):
        return member
    try:
        with as_file(content(path, member), f"image{STACKS[0]}") as file:
            return replace(member, pages=count_pages(file, f"{path}: {member.name}"))
    except InputError as error:
        return replace(member, pages=0, damage=str(error))


def _with_damage(path: Path, member: Member, reading: Reading) -> Member:
    """Return a member with the reason why it cannot be read, if any."""
    label, damage = f"{path}: {member.name}", ""
    try:
        count = len(reading.content(content(path, member), label))
        if not member.pages:
            damage = member.damage
        elif count != member.pages:
            damage = (
                f"{label}: expected {counted(member.pages, 'page')} from its header and suffix, got {count}."
            )
    except InputError as error:
        damage = str(error)
    return replace(member, damage=damage)
