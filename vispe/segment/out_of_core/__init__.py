"""Out-of-core segmentation: OME-Zarr in and out, block by block, with results identical to those in memory.

`vispe.segment.out_of_core.store_run` contains the run that `vispe.segment.pipeline` opens for stores. Each block of
the result is computed from all pieces of the page that intersect it, in page order, from pixels read with the margin
that filters need; so the result is bitwise identical. Finished blocks are recorded, and a killed run resumes where it
stopped.
"""

import glob
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from vispe.errors import InputError, OptionError, counted
from vispe.images.paths import expanded
from vispe.images.remote import is_url

_MARKS = ("zarr.json", ".zgroup", ".zarray", ".zattrs")


def is_store(path: str | Path) -> bool:
    """Return whether a path is a folder with a Zarr array or group, or a URL."""
    path = expanded(path)
    if is_url(path):
        return True
    return os.path.isdir(path) and (  # noqa: PTH112 - never raises, unlike Path.is_dir
        path.suffix.lower() == ".zarr" or any((path / mark).is_file() for mark in _MARKS)
    )


def find_stores(patterns: Sequence[str | Path]) -> tuple[list[Path], list[str | Path]]:
    """Split files, folders and globs into Zarr stores and the remaining patterns."""
    patterns = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    stores: dict[Path, Path] = {}
    rest: list[str | Path] = []
    for pattern in patterns:
        path = expanded(pattern)
        matches, is_folder = [path], os.path.isdir(path)  # noqa: PTH112
        if not is_url(path) and not os.path.lexists(path) and glob.has_magic(str(path)):
            # absolute paths too, unlike Path.glob
            matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
        elif is_folder and not is_store(path):
            matches = sorted(path.iterdir())
        stores_of_pattern = [match for match in matches if is_store(match)]
        stores |= {match.resolve(): match for match in stores_of_pattern}
        skipped = stores_of_pattern and is_folder and not _has_images(matches)
        if not matches or (len(stores_of_pattern) < len(matches) and not skipped):
            rest.append(pattern)
    return list(stores.values()), rest


def _has_images(paths: Sequence[Path]) -> bool:
    from vispe.images.formats.decoded_image import SUFFIXES

    return any(path.suffix.lower() in SUFFIXES and path.is_file() for path in paths)


def out_of_core_images(
    patterns: Sequence[str | Path], memory: str | None, scheduler: str | None
) -> list[Path]:
    """Return the images to be processed in blocks: stores, and TIFF files if `memory` or `scheduler` is set.

    Raises:
        InputError: stores are mixed with other images.
        OptionError: `memory` or `scheduler` is set for images that can only be read completely.
    """
    stores, rest = find_stores(patterns)
    stores = _without_companions(stores, patterns)
    if memory is None and scheduler is None:
        if stores and rest:
            raise InputError(
                f"{stores[0]} is a store and {rest[0]} is not. Segment stores and image files in separate runs."
            )
        return stores
    if rest:
        from vispe.images.file_search import find_images

        files = find_images(rest)
        other = [path for path in files if path.suffix.lower() not in (".tif", ".tiff")]
        if other:
            option = "memory" if memory is not None else "scheduler"
            raise OptionError(
                f"{option} has no effect on {other[0]}, which cannot be read in blocks. Omit it, or convert the "
                "image to OME-Zarr."
            )
        stores += files
    return stores


def _without_companions(stores: list[Path], patterns: Sequence[str | Path]) -> list[Path]:
    """Exclude stores that belong to another one by name, such as results, unless they are named explicitly."""
    from vispe.images.sidecars import companions

    companion_names = companions(map(output_stem, stores))
    all_patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    named = {str(pattern).rstrip("/") for pattern in all_patterns}
    excluded = [path for path in stores if output_stem(path) in companion_names and str(path) not in named]
    if excluded:
        listed = ", ".join(path.name for path in excluded[:5]) + (" ..." if len(excluded) > 5 else "")
        warnings.warn(
            f"Skipped {counted(len(excluded), 'store')} with the name of labels or results next to the images: "
            f"{listed}. Pass such a store by its name to segment it.",
            stacklevel=2,
        )
    return [path for path in stores if path not in excluded]


def output_stem(path: str | Path) -> str:
    """Return the name of an image without `.zarr`, `.ome.zarr`, `.tif` or `.ome.tif`."""
    name = Path(path).name if is_url(path) else Path(path).resolve().name
    for ending in (".zarr", ".tiff", ".tif"):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
            return name[:-4] if name.lower().endswith(".ome") else name
    return name
