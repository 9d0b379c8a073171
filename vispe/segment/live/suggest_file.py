"""Scribble suggestions for an image file, as in the command `vispe suggest`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vispe.errors import InputError, OptionError, counted
from vispe.images.labels.label_files import Labels, read_label_set
from vispe.images.read import Micrograph
from vispe.images.write import write_png
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.suggestions import COUNT, Suggestion, suggest
from vispe.segment.out_of_core import out_of_core_images
from vispe.segment.overlays import SMALLEST, text_style, to_rgb
from vispe.segment.run.image_pipeline import Reader
from vispe.segment.run.inputs import BatchImage, infer_axes, single_mask
from vispe.segment.types import LabelOptions, ReadOptions
from vispe.utils.files import check_writable, write_json

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
    reading: ReadOptions | None = None,
    labelling: LabelOptions | None = None,
    stored_features: str | Path | None = None,
    seed: int | None = None,
    device: str = "auto",
    force: bool = False,
    watch: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Suggest locations for the next scribbles on an image.

    Args:
        path: image file.
        out: folder for `<stem>_suggest.png`, numbered rings on the image, and `<stem>_suggest.json`.
        model: a `.vispe` file; either `model` or `labels` is required.
        labels: scribbles on this image, from which a model is trained as in `vispe segment`.
        count: maximal number of suggestions.
        page: index of the page of a stack, from 0; None for the middle page.
        features: with labels, the features of a pixel.
        classifier: with labels, the kind of classifier.
        reading: options of image reading; with a model, normalisation is that of the model.
        labelling: options of label reading.
        stored_features: folder of `vispe.segment.pipeline.store_features`.
        seed: with labels, seed of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing files.
        watch: called with each message for the user.

    Returns:
        The content of the JSON file: 'image', 'page', 'model' or 'labels', 'classes', 'places' (see `Suggestion`),
        'files' and 'notes'.

    Raises:
        OptionError: not exactly one of `model` and `labels`, or an option without effect.
        InputError: an unusable image, model or labels; existing files, without `force`.
    """
    path, out, reading = Path(path), Path(out), reading or ReadOptions()
    if (model is None) == (labels is None):
        sources = "neither" if model is None else "both"
        raise OptionError(
            f"suggest: exactly one of model and labels is required, got {sources}. Pass model=FILE or labels=FILE."
        )
    if out_of_core_images([path], None, None):
        raise OptionError(
            f"{path} is processed in blocks, but suggest needs the features of a complete page in memory. Crop a part "
            "and save it as a TIFF file."
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

    batch_image = BatchImage(path, labels=None if labels is None else Path(labels))
    infer_axes([batch_image], reading, note)
    batch_image.mask = single_mask(reading)
    image = Reader(reading, [batch_image]).read(path)
    page = image.n_pages // 2 if page is None else page
    options = {"features": features, "classifier": classifier, "seed": seed}
    label_set = None
    if model is not None:
        _refuse(model, {**options, "labelling": labelling})
        options = {"model": model}
    else:
        label_set = _read_labels(Path(str(labels)), image, labelling or LabelOptions(), note)
        options |= {"names": label_set.names, "colors": label_set.colors, "reading": reading}
    live = Live(image, page=page, device=device, watch=note, **options)
    if stored_features is not None:
        live.use_stored_features(stored_features, batch_image, reading)
    if label_set is not None:
        live.draw(label_set.values if image.n_pages > 1 else label_set.values[0])
        live.fit()
    prediction = live.predict()
    for text in prediction.notes:
        note(text)
    suggestions = suggest(live, count, prediction)
    if image.n_pages > 1:
        note(f"the suggestions are on page {page} of {image.n_pages} (from 0). Select another with page.")
    if len(suggestions) < count:
        note(
            f"{len(suggestions)} of {counted(count, 'location')} found: no other is far enough from scribbles and "
            "pixels without data."
        )
    grey, _ = live.normalized()
    out.mkdir(parents=True, exist_ok=True)
    write_png(files["png"], draw_suggestions(grey, suggestions), force)
    record = {
        "image": str(path),
        "page": page,
        **({"model": str(model)} if model is not None else {"labels": str(labels)}),
        "classes": list(live.model.names),
        "places": [{"number": n + 1, **suggestion.to_dict()} for n, suggestion in enumerate(suggestions)],
        "files": {kind: str(file) for kind, file in files.items()},
        "notes": notes,
    }
    write_json(files["json"], record, force=force)
    return record


def draw_suggestions(grey: np.ndarray, suggestions: list[Suggestion]) -> np.ndarray:
    """Draw a numbered ring around each suggestion.

    Args:
        grey: (h, w, c) float32 in [0, 1].
        suggestions: suggestions in the order of their numbers.

    Returns:
        (H, W, 3) uint8, enlarged by an integer factor if the longer side is below `SMALLEST`.
    """
    factor = max(1, -(-SMALLEST // max(grey.shape[:2])))
    figure = Image.fromarray(to_rgb(grey, factor))
    pen, font = ImageDraw.Draw(figure), text_style(max(figure.size)).bold
    line_width = max(2, round(max(figure.size) / 400))
    for number, suggestion in enumerate(suggestions, 1):
        x, y, r = (
            round(factor * value) for value in (suggestion.x + 0.5, suggestion.y + 0.5, suggestion.radius)
        )
        for color, extra in ((_EDGE, line_width), (_RING, 0)):
            box = (
                x - r - line_width - extra,
                y - r - line_width - extra,
                x + r + line_width + extra,
                y + r + line_width + extra,
            )
            pen.ellipse(box, outline=color, width=line_width + 2 * extra)
        # label next to the ring, on the right if it fits
        left, top, right, bottom = pen.textbbox((0, 0), str(number), font=font, stroke_width=line_width)
        at = x + r + 3 * line_width
        if at + right - left > figure.width:
            at = x - r - 3 * line_width - (right - left)
        up = int(np.clip(y - (bottom + top) / 2, -top, max(figure.height - bottom, 0)))
        pen.text((at, up), str(number), fill=_RING, font=font, stroke_width=line_width, stroke_fill=_EDGE)
    return np.asarray(figure)


def _refuse(model: str | Path, options: dict[str, Any]) -> None:
    """Raise OptionError for options that a model determines."""
    conflicts = [name for name, value in options.items() if value is not None]
    if conflicts:
        raise OptionError(
            f"{conflicts[0]} has no effect with a model, which determines it ({model}). Omit it."
        )


def _read_labels(
    path: Path, image: Micrograph, labelling: LabelOptions, note: Callable[[str], None]
) -> Labels:
    """Read the labels of the image, and announce their notes."""
    if not path.is_file():
        raise InputError(f"{path} does not exist. Check the name.")
    (label_set,) = read_label_set(
        [path], [image.pages.shape[:3]], **asdict(labelling), images=[image.path], frames=[image.frame]
    )
    for text in label_set.notes:
        note(text)
    return label_set
