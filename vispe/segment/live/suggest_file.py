"""The command `vispe suggest` on a file: read, choose places, draw and list them."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vispe.errors import InputError, OptionError
from vispe.files import check_writable, write_json
from vispe.images.labels.label_files import read_label_set
from vispe.images.read import Micrograph, read_image
from vispe.images.write import write_png
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.suggestions import COUNT, Place, suggest
from vispe.segment.out_of_core import large_images
from vispe.segment.overlays import SMALLEST, enlarged, lettering
from vispe.segment.run.inputs import BatchImage, Reading, one_mask, settle_axes
from vispe.segment.run.request import Labelling

_RING, _EDGE = (255, 230, 0), (0, 0, 0)


def suggest_file(
    path: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    labels: str | Path | None = None,
    count: int = COUNT,
    page: int | None = None,
    features: FeatureConfig | None = None,
    classifier: str | None = None,
    reading: Reading | None = None,
    labelling: Labelling | None = None,
    seed: int | None = None,
    device: str = "auto",
    force: bool = False,
    watch: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Suggest places for the next strokes on an image.

    Args:
        path: image file.
        out: folder for `<stem>_suggest.png`, numbered rings on the picture, and `<stem>_suggest.json`.
        model: a `.vispe` file, or
        labels: strokes on this image, from which a model is learnt as `vispe segment` does.
        count: places at most.
        page: of a stack, from 0; None: the middle one.
        features: with labels, what a pixel is described by.
        classifier: with labels, its kind.
        reading: how the image is read; with a model, normalisation is that of the model.
        labelling: how labels are read.
        seed: with labels, of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing files.
        watch: called with each thing that the user should know.

    Returns:
        What the JSON file holds: 'image', 'page', 'model' or 'labels', 'classes', 'places' (see `Place`), 'files' and
        'notes'.

    Raises:
        OptionError: not exactly one of `model` and `labels`, or an option that has no effect.
        InputError: an image, model or labels that cannot be used; files that exist, without `force`.
    """
    path, out, reading = Path(path), Path(out), reading or Reading()
    if (model is None) == (labels is None):
        given = "neither" if model is None else "both"
        raise OptionError(
            f"suggest needs one of model and labels, got {given}; use --model FILE or --labels FILE."
        )
    if large_images([path], None, None):
        raise OptionError(
            f"{path} is read block by block, but suggest keeps the features of a page in memory; cut out a part as a "
            "TIFF file."
        )
    files = {kind: out / f"{path.stem}_suggest.{kind}" for kind in ("png", "json")}
    inputs = [path, *(Path(each) for each in (model, labels) if each is not None)]
    check_writable(list(files.values()), force, protect=inputs)
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            if watch is not None:
                watch(text)

    own = BatchImage(path, labels=None if labels is None else Path(labels))
    settle_axes([own], reading, note)
    image = read_image(
        path,
        channel=reading.channel,
        z=reading.z,
        axes=own.axes or reading.axes,
        orientation=reading.orientation,
        crop=reading.crop,
        mask=one_mask(reading),
    )
    page = image.n_pages // 2 if page is None else page
    shared = {"page": page, "device": device, "watch": note}
    if model is not None:
        _refuse(model, {"features": features, "classifier": classifier, "labelling": labelling, "seed": seed})
        live = Live(image, model=model, **shared)
    else:
        how = {"features": features, "classifier": classifier, "seed": seed}
        live = _learnt(
            image, Path(str(labels)), labelling or Labelling(), note, reading=reading, **how, **shared
        )
    places = suggest(live, count)
    if image.n_pages > 1:
        note(
            f"the places are on page {page} of {image.n_pages} (counted from 0); choose another with --page."
        )
    if len(places) < count:
        note(
            f"{len(places)} of {count} places were found: nowhere else is room beside strokes and pixels without data."
        )
    grey, _ = live.normalized()
    out.mkdir(parents=True, exist_ok=True)
    write_png(files["png"], drawn(grey, places), force)
    record = {
        "image": str(path),
        "page": page,
        **({"model": str(model)} if model is not None else {"labels": str(labels)}),
        "classes": list(live.model.names),
        "places": [{"number": n + 1, **place.to_dict()} for n, place in enumerate(places)],
        "files": {kind: str(file) for kind, file in files.items()},
        "notes": notes,
    }
    write_json(files["json"], record, force=force)
    return record


def drawn(grey: np.ndarray, places: list[Place]) -> np.ndarray:
    """Draw a numbered ring around each place.

    Args:
        grey: (h, w, c) float32 in [0, 1].
        places: in the order of their numbers.

    Returns:
        (H, W, 3) uint8, enlarged by a whole factor where the longer side is below `SMALLEST`.
    """
    factor = max(1, -(-SMALLEST // max(grey.shape[:2])))
    picture = Image.fromarray(enlarged(grey, factor))
    pen, font = ImageDraw.Draw(picture), lettering(max(picture.size))
    wide = max(2, round(max(picture.size) / 400))
    for number, place in enumerate(places, 1):
        x, y, r = (round(factor * value) for value in (place.x + 0.5, place.y + 0.5, place.radius))
        for color, more in ((_EDGE, wide), (_RING, 0)):
            box = (x - r - wide - more, y - r - wide - more, x + r + wide + more, y + r + wide + more)
            pen.ellipse(box, outline=color, width=wide + 2 * more)
        # beside the ring, on the side where there is room
        left, top, right, bottom = pen.textbbox((0, 0), str(number), font=font, stroke_width=wide)
        at = x + r + 3 * wide
        if at + right - left > picture.width:
            at = x - r - 3 * wide - (right - left)
        up = int(np.clip(y - (bottom + top) / 2, -top, max(picture.height - bottom, 0)))
        pen.text((at, up), str(number), fill=_RING, font=font, stroke_width=wide, stroke_fill=_EDGE)
    return np.asarray(picture)


def _refuse(model: str | Path, given: dict[str, Any]) -> None:
    """Refuse options that a model decides."""
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        raise OptionError(
            f"{twice[0]} has no effect beside a model, which decides it ({model}); leave it out."
        )


def _learnt(
    image: Micrograph, path: Path, labelling: Labelling, note: Callable[[str], None], **options: Any
) -> Live:
    """Learn from strokes on the image."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; check the name.")
    (found,) = read_label_set(
        [path], [image.pages.shape[:3]], **asdict(labelling), images=[image.path], frames=[image.frame]
    )
    for text in found.notes:
        note(text)
    live = Live(image, names=found.names, colors=found.colors, **options)
    live.draw(found.values if image.n_pages > 1 else found.values[0])
    live.fit()
    return live
