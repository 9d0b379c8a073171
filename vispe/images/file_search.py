"""Which files people mean: patterns, folders and names become image files in natural order."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vispe.errors import InputError, did_you_mean, require
from vispe.images.formats.decoded_image import SUFFIXES
from vispe.images.formats.unsupported import foreign_format
from vispe.images.formats.vendors import ENDINGS
from vispe.images.paths import check_file, expanded


def find_images(patterns: Sequence[str | Path], also: tuple[str, ...] = ()) -> list[Path]:
    """Turn files, folders and globs into a list of image files.

    The order of `patterns` is kept, so that labels given in the same order belong together; what a folder or
    glob matches is in natural order (2 before 10).  Folders are not searched in depth (use ``**``); hidden
    files and files with other endings than `SUFFIXES` and those of microscopes are passed over in folders and
    globs.  A file that is matched twice comes once.  ``skimage:ihc`` is the picture ihc that scikit-image installs.

    Args:
        patterns: files, folders and globs.
        also: other endings of names, in lower case, that are looked for in folders and globs.

    Raises:
        InputError: a pattern that matches nothing, named; or no pattern at all.
    """
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    if not patterns:
        raise InputError("no image was given; name files, folders or globs such as 'data/*.png'.")
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _expand(pattern, (*SUFFIXES, *ENDINGS, *also)):
            found.setdefault(Path(os.path.realpath(path)), path)
    return list(found.values())


def _expand(pattern: str | Path, suffixes: tuple[str, ...]) -> list[Path]:
    if str(pattern).startswith("skimage:"):
        return [_installed(str(pattern).removeprefix("skimage:"))]
    path = expanded(pattern)
    endings = " ".join(suffixes)
    if os.path.isfile(path):  # noqa: PTH113 - never raises, unlike Path.is_file
        return [path]
    if os.path.isdir(path):  # noqa: PTH112
        matches = _images(path.iterdir(), suffixes)
        if not matches:
            kinds = {foreign_format(p): p for p in sorted(path.iterdir()) if p.is_file()}
            others = [f" {p.name} is there, but {kind}." for kind, p in kinds.items() if kind]
            raise InputError(f"the folder {path} holds no image; looked for {endings}.{''.join(others[:2])}")
        return matches
    if not glob.has_magic(str(path)):
        check_file(path)
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    # arrays and GIF are often no micrographs: only a glob for them finds them
    suffixes += tuple(end for end in (".npy", ".gif") if path.name.lower().endswith(end))
    matches = _images(Path(*path.parts[:fixed]).glob(str(Path(*path.parts[fixed:]))), suffixes)
    if not matches:
        raise InputError(f"{pattern} matches no image; looked for {endings}.")
    return matches


def _installed(name: str) -> Path:
    """Return a picture that scikit-image installs, by its name without ending."""
    require("skimage", "cli", "An image of scikit-image")
    folder = Path(importlib.util.find_spec("skimage").origin).parent / "data"
    known = {p.stem: p for p in _images(folder.iterdir(), SUFFIXES)}
    if name not in known:
        hint = did_you_mean(name, known)
        raise InputError(f"scikit-image installs no image {name!r}.{hint} It has: {', '.join(known)}.")
    return known[name]


def _images(paths: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    kept = [
        p for p in paths if p.name.lower().endswith(suffixes) and not p.name.startswith(".") and p.is_file()
    ]
    return sorted(kept, key=natural)


def match_files(
    images: Sequence[Path],
    files: Sequence[Path],
    what: str,
    stem: Callable[[Path], str] = lambda path: path.stem,
) -> tuple[dict[Path, Path], list[Path]]:
    """Give each file of labels, masks or truth to its image, by name.

    `a.png`, `a_mask.png`, `a-1.tif` and `a.labels.png` belong to `a.png`, and of several images to the one with the
    longest name. One file and one image belong together whatever they are called.

    Args:
        images: the images.
        files: in any order.
        what: what the files hold, for the message.
        stem: the name of a path without its ending.

    Returns:
        The file of each image that has one, and the files that belong to no image.

    Raises:
        InputError: two files of one image.

    Example:
        >>> matched, strays = match_files([Path("a.png"), Path("b.png")], [Path("b_mask.png"), Path("c.png")], "masks")
        >>> [(image.name, mask.name) for image, mask in matched.items()], [path.name for path in strays]
        ([('b.png', 'b_mask.png')], ['c.png'])
    """
    if len(images) == len(files) == 1:
        return {images[0]: files[0]}, []
    matched: dict[Path, Path] = {}
    strays = []
    for file in files:
        fitting = [image for image in images if _belongs(stem(file), stem(image))]
        if not fitting:
            strays.append(file)
            continue
        image = max(fitting, key=lambda path: len(stem(path)))
        if image in matched:
            raise InputError(f"{matched[image]} and {file} are both {what} of {image}; give one for each.")
        matched[image] = file
    return matched, strays


def _belongs(stem: str, image: str) -> bool:
    """Tell whether a file called `stem` goes with the image: the same, or followed by `_`, `-` or `.`."""
    return stem == image or (stem.startswith(image) and stem[len(image)] in "_-.")


def natural(path: str | Path) -> list[tuple[int, int, str]]:
    """Sort key that puts ``img2`` before ``img10``."""
    parts = re.findall(r"\d+|\D+", str(path))
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p.casefold()) for p in parts]
