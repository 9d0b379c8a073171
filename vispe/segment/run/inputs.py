"""The files of a run: which are images, and which labels and truth belong to each."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vispe.errors import InputError, OptionError
from vispe.images.annotations.annotation_files import ENDINGS
from vispe.images.file_search import find_images
from vispe.images.formats.decode import decode
from vispe.images.formats.headers import stored_planes, stored_shape
from vispe.images.labels.label_files import Labels
from vispe.images.orientation import Orientation, check_orientation
from vispe.images.sample import parse_crop
from vispe.images.sidecars import images_among, is_named, match_drawn

Paths = Sequence[str | Path]
_NUMBERS = 20  # largest value of labels that are numbers of classes and not colours


@dataclass(frozen=True)
class Reading:
    """How image files are read and normalised.

    Attributes:
        channel: channels to keep, by number or name, such as '0,2'; None keeps all.
        z: pages to keep, a number or 'a:b'; None keeps all.
        axes: what each dimension of the stored array means, such as 'ZYX'; None believes the file.
        normalize: 'stack', 'image' or 'none': what shares one pair of grey limits.
        clip: percentiles that become black and white.
        scene: which of several scenes of files of microscopes, by name or number (from 0).
        orientation: 'stored' reads pixels as they are stored, as Fiji, napari and ilastik do; 'tag' applies the
            orientation tag of the file.
        crop: rows and columns of the sample, such as '0:884,0:1024'; other pixels count in no number.
        mask: files with 0 for pixels that count in no number: one for all images, or several matched by name.
    """

    channel: str | None = None
    z: str | None = None
    axes: str | None = None
    normalize: str = "stack"
    clip: tuple[float, float] = (0.5, 99.5)
    scene: str | None = None
    orientation: Orientation = "stored"
    crop: str | None = None
    mask: Paths = ()

    def __post_init__(self) -> None:
        check_orientation(self.orientation)
        if self.crop is not None:
            parse_crop(self.crop)


@dataclass(eq=False)
class BatchImage:
    """One input file and what belongs to it."""

    path: Path
    labels: Path | None = None
    truth: Path | None = None
    drawn: Labels | None = None
    mask: Path | None = None
    axes: str | None = None


def listed(patterns: Paths) -> list[str | Path]:
    """Return patterns as a list; one alone is a list of one."""
    return [patterns] if isinstance(patterns, str | Path) else list(patterns)


def find_files(patterns: Paths) -> list[Path]:
    """Expand files, folders and globs of labels or truth; none given gives none."""
    patterns = listed(patterns)
    return find_images(patterns, ENDINGS) if patterns else []


def find_each(patterns: Sequence[str | Path], failed: Callable[[str, InputError], None]) -> dict[Path, bool]:
    """Expand the image patterns -> each file, and whether it was named by itself.

    In a batch, a pattern that matches nothing is a failure and not the end.

    Args:
        patterns: files, folders and globs.
        failed: called with such a pattern and the reason.

    Raises:
        InputError: the only pattern, or every one, matches nothing.
    """
    found: dict[Path, tuple[Path, bool]] = {}
    reasons = []
    for pattern in patterns or find_images(patterns):
        try:
            for path in find_images([pattern]):
                found.setdefault(path.resolve(), (path, is_named(pattern)))
        except InputError as error:
            if len(patterns) == 1:
                raise
            failed(str(pattern), error)
            reasons.append(" ".join(str(error).split()))
    if not found:
        raise InputError("; ".join(reasons))
    return dict(found.values())


def chosen(
    found: dict[Path, bool], labels: Sequence[Path], out: Path, note: Callable[[str], None]
) -> list[BatchImage]:
    """Set aside what is no image by its name, and say so; results in the folder of the run need no word.

    Args:
        found: each file, and whether it was named by itself.
        labels: files of labels and truth.
        out: folder of the results.
        note: called with what the user should know.
    """
    here = Path(os.path.realpath(out))  # which never raises, unlike resolve
    images, aside = images_among(found, labels, lambda path: path.resolve().parent == here)
    if aside:
        note(
            f"{len(aside)} file(s) beside the images are labels, masks or results by their names and are not "
            f"segmented: {_few(aside)}; name such a file itself to segment it."
        )
    return [BatchImage(path) for path in images]


def one_mask(reading: Reading) -> Path | None:
    """Return the mask for a single image; None for none.

    Raises:
        OptionError: several.
    """
    files = find_files(reading.mask)
    if len(files) > 1:
        raise OptionError(f"mask names {len(files)} files, but there is one image; give one mask.")
    return files[0] if files else None


def match_masks(images: Sequence[BatchImage], files: Sequence[Path], note: Callable[[str], None]) -> None:
    """Give each mask of the sample to its image by name; a single one belongs to every image."""
    if len(files) == 1:
        for image in images:
            image.mask = files[0]
    elif files:
        match(images, "mask", files, note)
        whole = [image.path for image in images if image.mask is None]
        if whole:
            note(f"{len(whole)} image(s) have no mask and are used as a whole: {_few(whole)}.")


def match(
    images: Sequence[BatchImage],
    what: Literal["labels", "truth", "mask"],
    files: Sequence[Path],
    note: Callable[[str], None],
) -> None:
    """Give each file of labels or truth to its image, by name.

    Args:
        images: of the run; their fields are filled.
        what: the field.
        files: in any order.
        note: called with what the user should know.

    Raises:
        InputError: two files for one image, or none for any.
    """
    matched, strays = match_drawn([image.path for image in images], files, what)
    if strays and not matched:
        names = ", ".join(image.path.stem for image in images[:3])
        raise InputError(
            f"no {what} file belongs to an image by name: found {strays[0].name} for images such as {names}; "
            "name them alike, for example a.png and a_labels.png."
        )
    for image in images:
        setattr(image, what, matched.get(image.path))
    if strays:
        note(f"{len(strays)} {what} file(s) belong to no image and are not used: {_few(strays)}.")


def _few(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:5]) + (" ..." if len(paths) > 5 else "")


def settle_axes(images: Sequence[BatchImage], reading: Reading, note: Callable[[str], None]) -> None:
    """Read an image of 3 or 4 colour planes as a stack where its labels or truth have as many pages, and say so.

    tifffile stores arrays of 3 or 4 slices like that. Labels that it has stored the same way are pages where their
    numbers are too small for colours.
    """
    for image in images:
        planes = 0 if reading.axes is not None else stored_planes(image.path)
        for partner in (image.labels, image.truth, image.mask) if planes else ():
            if partner is None or partner.suffix.lower() not in (".tif", ".tiff"):
                continue
            shape = stored_shape(partner)
            if shape is None:
                continue
            if shape[0] == planes or (stored_planes(partner) == planes and _numbers(partner)):
                image.axes = "ZYX"
                note(
                    f"{image.path.name} is read as a stack of {planes} slices, since {partner.name} has as many pages; "
                    "if its planes are colours, use --axes CYX."
                )
                break


def _numbers(path: Path) -> bool:
    """Tell whether the values of a label file are class numbers and not colours."""
    return decode(path).pages.max(initial=0) <= _NUMBERS
