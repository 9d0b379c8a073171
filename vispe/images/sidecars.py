"""Sidecar files in image folders, which are not input images: labels, masks, and results of earlier runs."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vispe.errors import InputError
from vispe.images.annotations.annotation_files import ENDINGS, images_in
from vispe.images.file_search import find_images, match_files
from vispe.images.paths import expanded

_RESULTS = "seg|prob|uncertainty|overlay|trust|disagreement|objects|object_classes"
_LABELS = "labels?|scribbles?|masks?|truth|gt|ground_truth|annotations?"
_SIDECAR = re.compile(rf"(.+)[_\-. ](?:{_RESULTS}|{_LABELS})", re.IGNORECASE | re.DOTALL)
_CLUSTER_FIGURE, _MODEL = "clusters.png", "model.vispe"  # figure of runs that select the number of clusters


def companions(stems: Iterable[str]) -> set[str]:
    """Return the stems that extend another stem by a suffix of labels, masks or results (`a_labels`, given `a`)."""
    stem_set = set(stems)
    return {stem for stem in stem_set if (match := _SIDECAR.fullmatch(stem)) and match[1] in stem_set}


def is_single_file(pattern: str | Path) -> bool:
    """Return whether a pattern is the name of one file, not a folder or glob."""
    return str(pattern).startswith("skimage:") or os.path.isfile(expanded(pattern))  # noqa: PTH113 - never raises


def find_label_files(patterns: Sequence[str | Path], files: Iterable[Path]) -> list[Path]:
    """Return the label or ground-truth files; images of the run in the same folder or glob are skipped.

    Args:
        patterns: files, folders and globs of labels.
        files: files that match the image patterns.
    """
    sidecar_stems = companions(path.stem for path in files)
    images = {path.resolve() for path in files if path.stem not in sidecar_stems}
    labels: dict[Path, Path] = {}
    for pattern in patterns:
        paths = find_images([pattern], ENDINGS)
        label_paths = [path for path in paths if path.resolve() not in images]
        labels |= {
            path.resolve(): path
            for path in (paths if is_single_file(pattern) or not label_paths else label_paths)
        }
    return list(labels.values())


def match_labels(
    images: Sequence[Path],
    files: Sequence[Path],
    what: str,
    stem: Callable[[Path], str] = lambda path: path.stem,
) -> tuple[dict[Path, Path], list[Path]]:
    """Match label or ground-truth files to images as `match_files`, and a COCO file to all images that it names.

    Raises:
        InputError: two files match one image.
    """
    coco_names = {file: names for file in files if (names := images_in(file))}
    if not coco_names or (len(images) == len(files) == 1 and len(coco_names[files[0]]) == 1):
        return match_files(images, files, what, stem)
    matched, unmatched = match_files(images, [file for file in files if file not in coco_names], what, stem)
    for file, names in coco_names.items():
        stems = {Path(name).stem for name in names}
        matching = [image for image in images if image.name in names or stem(image) in stems]
        unmatched += [] if matching else [file]
        for image in matching:
            if image in matched:
                raise InputError(
                    f"{image}: two {what} match, {matched[image]} and {file}. Pass one for each image."
                )
            matched[image] = file
    return matched, unmatched


def _is_chart(path: Path) -> bool:
    return path.name == _CLUSTER_FIGURE and path.with_name(_MODEL).is_file()


def split_sidecars(
    files: dict[Path, bool], labels: Iterable[Path], made: Callable[[Path], bool]
) -> tuple[list[Path], list[Path]]:
    """Split the files that match the image patterns into images and sidecar files.

    Args:
        files: files, each with a flag whether the user named it individually.
        labels: label or ground-truth files, which are not images.
        made: returns whether a file is a result of the current run.

    Returns:
        The images, and the skipped sidecar files, without those that are `made`.

    Raises:
        InputError: no images remain.
    """
    sidecar_stems, label_paths = companions(path.stem for path in files), {path.resolve() for path in labels}
    single = len(files) == 1
    images, sidecars = [], []
    for path, named in files.items():
        companion = path.stem in sidecar_stems or _is_chart(path)
        if (path.resolve() in label_paths and not single) or (companion and not named):
            sidecars.append(path)
        else:
            images.append(path)
    if not images:
        raise InputError(
            f"{sidecars[0]} and all other images are also labels or truth. Pass images in addition to them."
        )
    return images, [path for path in sidecars if not made(path)]
