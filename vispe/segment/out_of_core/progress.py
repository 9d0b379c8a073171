"""What is done already: a record for each finished chunk, and a description of the run that made it.

Folder `name_seg.partial` holds an unfinished result: `raw`, the probabilities of the classifier, with one small file in
`done` for each chunk (written after its pixels); `store`, what is made of them, likewise with `settled`; `picture`, and
`job.json`. `unfinished.json` beside it says what the run was asked to do; a run that
is asked for the same goes on.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.files import MARK, check_no_link, remove, write_json
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.out_of_core import zarr_store
from vispe.segment.out_of_core.image_source import BigImage
from vispe.segment.out_of_core.job import Block, Job

RUN = "unfinished.json"
DONE, SETTLED = "done", "settled"
_ENTRY = re.compile(r"raw|store|picture|marks|done|settled|\.?(job|limits|record|areas\.\d+)\.json(\.\d+)?")
_ORIGIN = Region(0, 0, 0, 0)


def can_go_on(out: Path, asked: Mapping[str, Any], force: bool) -> list[dict[str, Any]] | None:
    """Return the records of finished images of a run that was asked for the same and did not end; None if none.

    Raises:
        InputError: an unfinished run that was asked for something else, and not `force`.
    """
    check_no_link(out / RUN)
    try:
        found = json.loads((out / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        found = {}
    found = found if isinstance(found, dict) else {}
    begun, plain = found.get("asked", {}), json.loads(json.dumps(asked))
    begun = begun if isinstance(begun, dict) else {}
    if begun == plain:
        return found["finished"]
    if not force and (found.get("finished") or any(out.glob("*_seg.partial/job.json"))):
        other = [key for key in {**plain, **begun} if plain.get(key) != begun.get(key)]
        raise InputError(
            f"{out} holds an unfinished run with other {', '.join(k.replace('_', ' ') for k in other)}; repeat that "
            "command to go on, add --force to begin anew, or choose another folder."
        )
    return None


def note_run(
    out: Path, asked: Mapping[str, Any], finished: Sequence[Mapping[str, Any]], model: str | None
) -> None:
    """Keep what a run was asked to do, the SHA-256 of its model and the records of its images, until `forget_run`."""
    write_json(out / RUN, {"asked": asked, "finished": finished, "model": model}, force=True)


def trained_model(out: Path) -> str | None:
    """Return the SHA-256 of the model file of an unfinished run; None as long as it has none."""
    try:
        return json.loads((out / RUN).read_text(encoding="utf-8")).get("model")
    except (FileNotFoundError, ValueError):
        return None


def check_partial(path: Path) -> None:
    """Check that an unfinished result may be removed or resumed.

    Raises:
        InputError: `path` is a link, a file, or a folder that holds anything but what vispe writes there.
    """
    check_no_link(path)
    if not os.path.lexists(path):
        return
    foreign = not path.is_dir() or any(
        entry.is_symlink() or not _ENTRY.fullmatch(entry.name) for entry in path.iterdir()
    )
    if foreign:
        raise InputError(
            f"{path} is not an unfinished result of vispe; move it, or choose another output folder."
        )


def check_result(path: Path) -> None:
    """Check that a store of a result may be replaced: it carries the metadata that `store.finish` writes.

    Raises:
        InputError: `path` is a link, or a folder that vispe has not written.
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
        f"{path} is not a result of vispe and is not replaced; move it, or choose another folder."
    )


def left_behind(out: Path, stems: Sequence[str]) -> list[str]:
    """Return the names of unfinished results of other images in a folder."""
    ours = {partial(out, stem).name for stem in stems}
    return sorted(path.name for path in out.glob("*_seg.partial") if path.name not in ours)


def forget_run(out: Path) -> None:
    """The run is finished."""
    (out / RUN).unlink(missing_ok=True)


def partial(out: Path, stem: str) -> Path:
    """Return the folder of an unfinished result."""
    return out / f"{stem}_seg.partial"


def chunk_regions(image: BigImage, chunk: int) -> list[Region]:
    """Return the chunks of a page of the result."""
    return blocks(*image.shape, chunk)


def create_raw(work: Path, image: BigImage, n_classes: int, chunk: int) -> None:
    """Make the array for the probabilities of the classifier, (page, K, h, w)."""
    create_array(work / "raw", (image.n_pages, n_classes, *image.shape), (1, 1, chunk, chunk))


def create_array(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    """Make an array of float32, in place of one that is there."""
    import zarr

    zarr.create_array(store=str(path), shape=shape, chunks=chunks, dtype=np.float32, overwrite=True)


def read_raw(work: Path, page: int, region: Region) -> np.ndarray:
    """Read the probabilities (K, rows, columns) of the classifier for a region of a page."""
    import zarr

    return np.asarray(zarr.open_array(str(work / "raw"), mode="r")[(page, slice(None), *region.slices)])


def write_block(job: Job, page: int, region: Region, block: Block) -> None:
    """Write the pixels of a block, then the records of its chunks; called in the process that computed it."""
    import zarr

    work = Path(job.work)
    zarr.open_array(str(work / "raw"), mode="r+")[(page, slice(None), *region.slices)] = block.prob
    if block.picture is not None:
        top, left = region.top // job.reduction, region.left // job.reduction
        where = slice(top, top + block.picture.shape[0]), slice(left, left + block.picture.shape[1])
        zarr.open_array(str(work / "picture"), mode="r+")[where] = block.picture
    for part in blocks(*region.shape, job.chunk):
        record = {
            "overlap": int(block.twice[part.slices].sum()),
            "disagreeing": int(block.differ[part.slices].sum()),
            "seen": None if block.seen is None else block.seen.sums(part).tolist(),
        }
        write_small(_record(work, DONE, page, region, part, job.chunk), record)


def write_settled(
    job: Job, image: BigImage, page: int, region: Region, found: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Write the weighed probabilities (K, h, w), labels and uncertainty of a block, then the records of its chunks."""
    work, (prob, labels, uncertainty) = Path(job.work), found
    zarr_store.write(work / "store", image, page, region, *found)
    for part in blocks(*region.shape, job.chunk):
        unsure = np.ascontiguousarray(uncertainty[part.slices])
        record = {
            "counts": np.bincount(labels[part.slices].ravel(), minlength=len(prob) + 1).tolist(),
            "unsure": float(np.nansum(unsure, dtype=np.float64)),
        }
        write_small(_record(work, SETTLED, page, region, part, job.chunk), record)


def is_done(work: Path, page: int, region: Region, chunk: int, what: str = DONE) -> bool:
    """Tell whether all chunks of a block are recorded as `DONE`, or as `SETTLED`."""
    return all(_record(work, what, page, region, p, chunk).is_file() for p in blocks(*region.shape, chunk))


def sums(work: Path, image: BigImage, chunk: int, n_classes: int) -> dict[str, Any]:
    """Add up the records of all chunks, in their order.

    'pages' has the pixels of each label (K + 1,) page by page, 'seen' likewise, None where nothing was compared.
    """
    seen: list[np.ndarray | None] = []
    pages = np.zeros((image.n_pages, n_classes + 1), np.int64)
    unsure, overlap, disagreeing = 0.0, 0, 0
    for page in range(image.n_pages):
        own: list[list[int] | None] = []
        for region in chunk_regions(image, chunk):
            record: dict[str, Any] = {}
            for what in (DONE, SETTLED):
                record |= json.loads(_record(work, what, page, region, _ORIGIN, chunk).read_text())
            pages[page] += np.array(record["counts"])
            unsure += record["unsure"]
            overlap += record["overlap"]
            disagreeing += record["disagreeing"]
            own.append(record["seen"])
        seen.append(None if None in own else np.sum(own, 0))
    found = {"counts": pages.sum(0), "unsure": unsure, "overlap": overlap, "disagreeing": disagreeing}
    return {**found, "pages": pages, "seen": seen}


def put_in_place(path: Path, target: Path) -> None:
    """Rename a folder to `target`, in place of an earlier result of vispe.

    Raises:
        InputError: `target` exists and is not a result of vispe.
    """
    check_result(target)
    if target.exists():
        old = target.with_name(f".{target.name}{MARK}{uuid.uuid4().hex[:12]}")
        target.rename(old)
        path.rename(target)
        remove(old, old.parent)
    else:
        path.rename(target)


def _record(work: Path, what: str, page: int, region: Region, part: Region, chunk: int) -> Path:
    """Name the record of a chunk, the part of a region that begins at `part`."""
    row, column = (region.top + part.top) // chunk, (region.left + part.left) // chunk
    return work / what / f"{page}.{row}.{column}.json"


def write_small(path: Path, content: Any) -> None:
    """Write a small JSON file, complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
