"""Whether an image of a run differs from those of training: learnt with the model, said of each image."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.read import Micrograph
from vispe.images.write import write_png
from vispe.segment.classify.out_of_distribution import Domain, learn_domain
from vispe.segment.features.sample_grid import PAGES, PATCH, PIECES, Sample
from vispe.segment.model.model_file import Model

MAP = "_domain.png"


def learn_pages(pages: Sequence[Any], samples: Callable[[Any, int], Sample | None]) -> Domain | None:
    """Summarise training pages: all pieces of a few, some pieces of many.

    Args:
        pages: whatever `samples` takes.
        samples: samples a page on so many of its pieces.
    """
    from threadpoolctl import threadpool_limits

    chosen = np.unique(np.linspace(0, len(pages) - 1, min(len(pages), PAGES)).round().astype(int)).tolist()
    most = max(PIECES // max(len(chosen), 1), 1)
    found = [samples(pages[number], most) for number in chosen]
    with threadpool_limits(
        1
    ):  # matrices of a few dozen columns: threads wait for each other longer than they work
        return learn_domain([one for one in found if one is not None])


def judged(model: Model, sums: Sequence[np.ndarray | None]) -> dict[str, Any] | None:
    """Return what the report says of an image, from the sums of its pages; None where nothing can be compared.

    Returns:
        'score': the largest of the pages, 1 is the limit; 'differs': whether it is above; 'pages': the score of each,
        None for a page without data.
    """
    if model.domain is None or any(one is None for one in sums):
        return None
    scores = [model.domain.score(one) for one in sums if one is not None]
    known = [score for score in scores if score is not None]
    if not known:
        return None
    return {"score": max(known), "differs": max(known) > 1, "pages": scores}


def warned(name: str, record: dict[str, Any] | None, shown: str | None) -> list[str]:
    """Return a note about an image that differs from those of training.

    Args:
        name: of the image.
        record: what the report says.
        shown: the file with the map; None where there is none.
    """
    if record is None or not record["differs"]:
        return []
    strange = [n for n, score in enumerate(record["pages"]) if score is not None and score > 1]
    what = f"{name} differs"
    if len(record["pages"]) > 1:
        listed = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
        what = f"{len(strange)} of the {len(record['pages'])} pages of {name} (from 0: {listed}) differ"
    where = (
        "no map is made of images that are read block by block" if shown is None else f"{shown} shows where"
    )
    return [
        f"{what} from the training images: score {record['score']:.2g}, where 1 is the limit ({where}); its classes "
        "may be wrong: look at the overlay, draw a few strokes on it, and train again with both."
    ]


def write_map(
    folder: Path, path: Path, micrograph: Micrograph, seen: Sequence[Any], record: dict[str, Any], force: bool
) -> Path:
    """Write the map of the page that differs most, 8 bit: 128 is the limit of a patch, 255 twice that or more.

    Args:
        folder: where it goes.
        path: of the image, for its name.
        micrograph: the image.
        seen: of each page.
        record: what the report says of the image.
        force: overwrite.
    """
    scores = [-1.0 if score is None else score for score in record["pages"]]
    found = seen[int(np.argmax(scores))].map()
    grey = np.rint(np.clip(np.nan_to_num(found), 0, 2) * 127.5).astype(np.uint8)
    height, width = micrograph.pages.shape[1:3]
    # the rim beyond the last point of the lattice belongs to the last patch
    rows, columns = (
        np.minimum(np.arange(n) // PATCH, m - 1) for n, m in zip((height, width), grey.shape, strict=True)
    )
    target = folder / f"{path.stem}{MAP}"
    write_png(target, grey[np.ix_(rows, columns)], force, micrograph=micrograph)
    return target
