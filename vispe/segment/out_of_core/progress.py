"""Unfinished results of out-of-core images: pixels, and a record for each finished chunk.

Folder `name_seg.partial` contains an unfinished result: `raw`, the probabilities of the classifier, with one
small file in `done` for each chunk, written after the pixels of the chunk; `store`, the final result, with
such files in `settled`; `picture`, and `job.json`. The journal of the run is next to this folder.
"""

import json
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.out_of_core import zarr_store
from vispe.segment.out_of_core.job import Job, PredictedBlock
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.utils.files import MARK, check_no_link, remove

DONE, SETTLED = "done", "settled"
_ENTRY = re.compile(r"raw|store|picture|marks|done|settled|\.?(job|limits|record|areas\.\d+)\.json(\.\d+)?")
_ORIGIN = Region(0, 0, 0, 0)


def check_partial(path: Path) -> None:
    """Check that an unfinished result may be removed or resumed.

    Raises:
        InputError: `path` is a link, a file, or a folder with unexpected content.
    """
    check_no_link(path)
    if not os.path.lexists(path):
        return
    unexpected = not path.is_dir() or any(
        entry.is_symlink() or not _ENTRY.fullmatch(entry.name) for entry in path.iterdir()
    )
    if unexpected:
        raise InputError(
            f"{path} is not an unfinished result of vispe. Move it, or choose another output folder."
        )


def check_result(path: Path) -> None:
    """Check that a store may be replaced: it has the metadata that `store.finish` writes.

    Raises:
        InputError: `path` is a link, or a folder not written by vispe.
    """
    check_no_link(path)
    if not os.path.lexists(path):
        return
    for name in ("zarr.json", ".zattrs"):
        try:
            content = json.loads((path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        attributes = (
            content.get("attributes") if name == "zarr.json" and isinstance(content, dict) else content
        )
        if isinstance(attributes, dict) and "vispe" in attributes:
            return
    raise InputError(
        f"{path} is not a result of vispe and is not replaced. Move it, or choose another folder."
    )


def other_partial_results(out: Path, stems: Sequence[str]) -> list[str]:
    """Return the names of unfinished results of other images in a folder."""
    own_folders = {partial(out, stem).name for stem in stems}
    return sorted(path.name for path in out.glob("*_seg.partial") if path.name not in own_folders)


def partial(out: Path, stem: str) -> Path:
    """Return the folder of an unfinished result."""
    return out / f"{stem}_seg.partial"


def chunk_regions(image: OutOfCoreImage, chunk: int) -> list[Region]:
    """Return the chunks of a page of the result."""
    return blocks(*image.shape, chunk)


def create_raw(work: Path, image: OutOfCoreImage, n_classes: int, chunk: int) -> None:
    """Create the array for the probabilities of the classifier, (page, K, h, w)."""
    create_array(work / "raw", (image.n_pages, n_classes, *image.shape), (1, 1, chunk, chunk))


def create_array(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    """Create a float32 array, replacing an existing one."""
    import zarr

    zarr.create_array(store=str(path), shape=shape, chunks=chunks, dtype=np.float32, overwrite=True)


def read_raw(work: Path, page: int, region: Region) -> np.ndarray:
    """Read the probabilities (K, rows, columns) of the classifier for a region of a page."""
    import zarr

    return np.asarray(zarr.open_array(str(work / "raw"), mode="r")[(page, slice(None), *region.slices)])


def write_block(job: Job, page: int, region: Region, block: PredictedBlock) -> None:
    """Write the pixels of a block, then the records of its chunks; called in the process that computed it."""
    import zarr

    work = Path(job.work)
    # pixels first, then the records: a chunk with a record is complete
    zarr.open_array(str(work / "raw"), mode="r+")[(page, slice(None), *region.slices)] = block.prob
    if block.thumbnail is not None:
        top, left = region.top // job.reduction, region.left // job.reduction
        index = slice(top, top + block.thumbnail.shape[0]), slice(left, left + block.thumbnail.shape[1])
        zarr.open_array(str(work / "picture"), mode="r+")[index] = block.thumbnail
    for part in blocks(*region.shape, job.chunk):
        record = {
            "overlap": int(block.twice[part.slices].sum()),
            "disagreeing": int(block.differ[part.slices].sum()),
            "seen": None if block.feature_grid is None else block.feature_grid.sums(part).tolist(),
        }
        write_small(_record(work, DONE, page, region, part, job.chunk), record)


def write_final(
    job: Job,
    image: OutOfCoreImage,
    page: int,
    region: Region,
    result: tuple[np.ndarray, np.ndarray, np.ndarray],
    has_large_component: bool,
) -> None:
    """Write the reweighted probabilities (K, h, w), labels and uncertainty of a block, then its chunk records."""
    work, (prob, labels, uncertainty) = Path(job.work), result
    zarr_store.write(work / "store", image, page, region, *result)
    for part in blocks(*region.shape, job.chunk):
        uncertainty_of_chunk = np.ascontiguousarray(uncertainty[part.slices])
        record = {
            "counts": np.bincount(labels[part.slices].ravel(), minlength=len(prob) + 1).tolist(),
            "unsure": float(np.nansum(uncertainty_of_chunk, dtype=np.float64)),
            "has_large_component": has_large_component,
        }
        write_small(_record(work, SETTLED, page, region, part, job.chunk), record)


def is_finished(work: Path, page: int, region: Region, chunk: int, what: str = DONE) -> bool:
    """Return whether all chunks of a block are recorded as `DONE`, or as `SETTLED`."""
    return all(_record(work, what, page, region, p, chunk).is_file() for p in blocks(*region.shape, chunk))


def sum_records(work: Path, image: OutOfCoreImage, chunk: int, n_classes: int) -> dict[str, Any]:
    """Sum the records of all chunks, in page order.

    'pages' are the pixels of each label (K + 1,) page by page, 'seen' the feature sums, None without a reference.
    """
    feature_sums: list[np.ndarray | None] = []
    pages = np.zeros((image.n_pages, n_classes + 1), np.int64)
    uncertainty_sum, overlap, disagreeing, has_large_component = 0.0, 0, 0, True
    for page in range(image.n_pages):
        page_sums: list[list[int] | None] = []
        for region in chunk_regions(image, chunk):
            record: dict[str, Any] = {}
            for what in (DONE, SETTLED):
                record |= json.loads(_record(work, what, page, region, _ORIGIN, chunk).read_text())
            pages[page] += np.array(record["counts"])
            uncertainty_sum += record["unsure"]
            overlap += record["overlap"]
            disagreeing += record["disagreeing"]
            has_large_component &= record["has_large_component"]
            page_sums.append(record["seen"])
        feature_sums.append(None if None in page_sums else np.sum(page_sums, 0))
    totals = {
        "counts": pages.sum(0),
        "unsure": uncertainty_sum,
        "overlap": overlap,
        "disagreeing": disagreeing,
        "has_large_component": has_large_component,
    }
    return {**totals, "pages": pages, "seen": feature_sums}


def publish(path: Path, target: Path) -> None:
    """Rename a folder to `target`, replacing an earlier result of vispe.

    Raises:
        InputError: `target` exists and is not a result of vispe.
    """
    check_result(target)
    if target.exists():
        replaced = target.with_name(f".{target.name}{MARK}{uuid.uuid4().hex[:12]}")
        target.rename(replaced)
        path.rename(target)
        remove(replaced, replaced.parent)
    else:
        path.rename(target)


def _record(work: Path, what: str, page: int, region: Region, part: Region, chunk: int) -> Path:
    """Return the path of the record of a chunk, the part of a region that starts at `part`."""
    row, column = (region.top + part.top) // chunk, (region.left + part.left) // chunk
    return work / what / f"{page}.{row}.{column}.json"


def write_small(path: Path, content: Any) -> None:
    """Write a small JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def has_blocks(work: Path) -> bool:
    """Whether a block of a job is done."""
    return next((work / DONE).glob("*.json"), None) is not None


def create_results(job: Job, image: OutOfCoreImage, n_classes: int) -> None:
    """Create the empty arrays of a result, and store its job."""
    work = Path(job.work)
    remove(work / "store", work)
    for name in (DONE, SETTLED):
        (work / name).mkdir(parents=True, exist_ok=True)
    create_raw(work, image, n_classes, job.chunk)
    zarr_store.create(work / "store", image, n_classes, job.chunk)
    height, width = (-(-n // job.reduction) for n in image.shape)
    side = job.chunk // job.reduction
    shape, chunks = (height, width, image.channels), (side, side, image.channels)
    create_array(work / "picture", shape, chunks)
    write_small(work / "job.json", asdict(job))
