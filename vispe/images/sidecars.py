"""What lies beside images in a folder and is none: labels, masks, and the results of earlier runs."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vispe.errors import InputError
from vispe.images.annotations.annotation_files import ENDINGS, images_in
from vispe.images.file_search import find_images, match_files
from vispe.images.paths import expanded

_MADE = "seg|prob|uncertainty|overlay|trust|disagreement|objects"
_DRAWN = "labels?|scribbles?|masks?|truth|gt|ground_truth|annotations?"
_COMPANION = re.compile(rf"(.+)[_\-. ](?:{_MADE}|{_DRAWN})", re.IGNORECASE | re.DOTALL)
_CHART, _MODEL = "clusters.png", "model.vispe"  # of a run that chose a number of clusters


def companions(stems: Iterable[str]) -> set[str]:
    """Return the stems that are another one with an ending of labels, masks or results, such as a_labels beside a."""
    known = set(stems)
    return {stem for stem in known if (found := _COMPANION.fullmatch(stem)) and found[1] in known}


def is_named(pattern: str | Path) -> bool:
    """Tell whether a pattern is the name of one file, and no folder or glob."""
    return str(pattern).startswith("skimage:") or os.path.isfile(expanded(pattern))  # noqa: PTH113 - never raises


def labels_among(patterns: Sequence[str | Path], found: Iterable[Path]) -> list[Path]:
    """Find files of labels or truth; where a folder or glob gives images of the run too, these are left out.

    Args:
        patterns: files, folders and globs of labels; none gives none.
        found: what was found for images.
    """
    beside = companions(path.stem for path in found)
    images = {path.resolve() for path in found if path.stem not in beside}
    labels: dict[Path, Path] = {}
    for pattern in patterns:
        paths = find_images([pattern], ENDINGS)
        drawn = [path for path in paths if path.resolve() not in images]
        labels |= {path.resolve(): path for path in (paths if is_named(pattern) or not drawn else drawn)}
    return list(labels.values())


def match_drawn(
    images: Sequence[Path],
    files: Sequence[Path],
    what: str,
    stem: Callable[[Path], str] = lambda path: path.stem,
) -> tuple[dict[Path, Path], list[Path]]:
    """Give each file of labels or truth to its image as `match_files` does, a COCO file to every image that it names.

    Raises:
        InputError: two files of one image.
    """
    named = {file: names for file in files if (names := images_in(file))}
    if not named or (len(images) == len(files) == 1 and len(named[files[0]]) == 1):
        return match_files(images, files, what, stem)
    matched, strays = match_files(images, [file for file in files if file not in named], what, stem)
    for file, names in named.items():
        stems = {Path(name).stem for name in names}
        own = [image for image in images if image.name in names or stem(image) in stems]
        strays += [] if own else [file]
        for image in own:
            if image in matched:
                raise InputError(
                    f"{matched[image]} and {file} are both {what} of {image}; give one for each."
                )
            matched[image] = file
    return matched, strays


def _is_chart(path: Path) -> bool:
    return path.name == _CHART and path.with_name(_MODEL).is_file()


def images_among(
    found: dict[Path, bool], labels: Iterable[Path], made: Callable[[Path], bool]
) -> tuple[list[Path], list[Path]]:
    """Divide what was found for images into images and files that belong to one.

    Args:
        found: files, and whether the user named each of them by itself.
        labels: files of labels or truth, which are no images.
        made: whether a file is a result of this very run.

    Returns:
        The images, and the files that are set aside, without those that are `made`.

    Raises:
        InputError: no image is left.
    """
    beside, others = companions(path.stem for path in found), {path.resolve() for path in labels}
    alone = len(found) == 1
    images, aside = [], []
    for path, named in found.items():
        companion = path.stem in beside or _is_chart(path)
        if (path.resolve() in others and not alone) or (companion and not named):
            aside.append(path)
        else:
            images.append(path)
    if not images:
        raise InputError(
            f"{aside[0]} and all other images are given as labels or truth too; give images beside them."
        )
    return images, [path for path in aside if not made(path)]
