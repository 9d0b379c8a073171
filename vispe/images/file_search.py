"""Search for image files by names, folders and globs, in natural order; and matching of label files to images."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vispe.errors import InputError, did_you_mean, require
from vispe.images.formats.decoded_image import SUFFIXES
from vispe.images.formats.unsupported import unsupported_format
from vispe.images.formats.vendors.registry import ENDINGS
from vispe.images.paths import check_file, expanded


def find_images(patterns: Sequence[str | Path], also: tuple[str, ...] = ()) -> list[Path]:
    """Return the image files of a list of files, folders and globs.

    The order of `patterns` is preserved; matches of a folder or glob are in natural order (2 before 10). Folders are
    not searched recursively (use ``**``). Hidden files and files with suffixes other than `SUFFIXES` and those of
    microscope formats are skipped in folders and globs. Duplicates are removed. ``skimage:ihc`` is the image ihc
    of scikit-image.

    Args:
        patterns: files, folders and globs.
        also: additional lower-case suffixes for folders and globs.

    Raises:
        InputError: a pattern has no match, or there are no patterns.
        MissingExtra: ``skimage:`` without scikit-image.
    """
    if isinstance(patterns, str | Path):
        patterns = [patterns]
    if not patterns:
        raise InputError(
            "find_images: no image files, got an empty list. Pass files, folders or globs ('data/*.png')."
        )
    by_real_path: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _expand(pattern, (*SUFFIXES, *ENDINGS, *also)):
            by_real_path.setdefault(Path(os.path.realpath(path)), path)
    return list(by_real_path.values())


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
            kinds = {unsupported_format(p): p for p in sorted(path.iterdir()) if p.is_file()}
            others = [f" {p.name} is not supported: {kind}." for kind, p in kinds.items() if kind]
            raise InputError(f"the folder {path} contains no image with {endings}.{''.join(others[:2])}")
        return matches
    if not glob.has_magic(str(path)):
        check_file(path)
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    # these files are rarely micrographs, so they need a pattern with their suffix
    suffixes += tuple(end for end in (".npy", ".gif", ".pfm") if path.name.lower().endswith(end))
    matches = _images(Path(*path.parts[:fixed]).glob(str(Path(*path.parts[fixed:]))), suffixes)
    if not matches:
        raise InputError(f"{pattern} matches no image with {endings}.")
    return matches


def _installed(name: str) -> Path:
    """Return a sample image of scikit-image by its stem."""
    require("skimage", "cli", "An image of scikit-image")
    folder = Path(importlib.util.find_spec("skimage").origin).parent / "data"
    by_stem = {p.stem: p for p in _images(folder.iterdir(), SUFFIXES)}
    if name not in by_stem:
        hint = did_you_mean(name, by_stem)
        raise InputError(f"scikit-image has no sample image {name!r}.{hint} Available: {', '.join(by_stem)}.")
    return by_stem[name]


def _images(paths: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    matching = [
        p for p in paths if p.name.lower().endswith(suffixes) and not p.name.startswith(".") and p.is_file()
    ]
    return sorted(matching, key=natural)


def match_files(
    images: Sequence[Path],
    files: Sequence[Path],
    what: str,
    stem: Callable[[Path], str] = lambda path: path.stem,
) -> tuple[dict[Path, Path], list[Path]]:
    """Match label, mask or ground-truth files to images by name.

    `a.png`, `a_mask.png`, `a-1.tif` and `a.labels.png` match `a.png`; of several matching images the one with the
    longest name is used. A single file matches a single image regardless of their names.

    Args:
        images: the images.
        files: files to match, in any order.
        what: kind of the files, for messages.
        stem: returns the stem of a path.

    Returns:
        The matching file by image, for images with a match, and the files that match no image.

    Raises:
        InputError: two files match one image.

    Example:
        >>> masks = [Path("b_mask.png"), Path("c.png")]
        >>> matched, unmatched = match_files([Path("a.png"), Path("b.png")], masks, "masks")
        >>> [(image.name, mask.name) for image, mask in matched.items()], [path.name for path in unmatched]
        ([('b.png', 'b_mask.png')], ['c.png'])
    """
    if len(images) == len(files) == 1:
        return {images[0]: files[0]}, []
    matched: dict[Path, Path] = {}
    unmatched = []
    for file in files:
        candidates = [image for image in images if _belongs(stem(file), stem(image))]
        if not candidates:
            unmatched.append(file)
            continue
        image = max(candidates, key=lambda path: len(stem(path)))
        if image in matched:
            raise InputError(
                f"{image}: two {what} match, {matched[image]} and {file}. Pass one for each image."
            )
        matched[image] = file
    return matched, unmatched


def _belongs(stem: str, image: str) -> bool:
    """Return whether `stem` is the stem of the image, or continues it after `_`, `-` or `.`."""
    return stem == image or (stem.startswith(image) and stem[len(image)] in "_-.")


def natural(path: str | Path) -> list[tuple[int, int, str]]:
    """Return a natural sort key (``img2`` before ``img10``)."""
    parts = re.findall(r"\d+|\D+", str(path))
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p.casefold()) for p in parts]
