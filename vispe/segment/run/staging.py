"""The files of one image: all of them or none."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vispe.files import MARK, rename_new


@contextmanager
def staged(folder: Path, stem: str, force: bool) -> Iterator[Path]:
    """Yield a hidden folder for the files of an image; in the end all go to their place, or none does.

    A process that is killed leaves at most the hidden folder, whose name contains `MARK`.

    Args:
        folder: of the results.
        stem: name of the image without ending.
        force: replace files that exist.

    Raises:
        InputError: a file exists and not `force`.
    """
    place = folder / f".{stem[:100]}{MARK}{uuid.uuid4().hex[:12]}"
    place.mkdir()
    try:
        yield place
        # the label map comes last, so it stands for a complete image
        for file in sorted(place.iterdir(), key=lambda file: (file.stem.endswith("_seg"), file.name)):
            if force:
                file.replace(folder / file.name)
            else:
                rename_new(file, folder / file.name)
    finally:
        shutil.rmtree(place, ignore_errors=True)
