"""Staging folder: all files of one image are published together, or none."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vispe.utils.files import MARK, rename_new


@contextmanager
def staged_files(folder: Path, stem: str, force: bool) -> Iterator[Path]:
    """Yield a hidden folder for the files of an image; at the end either all files are moved into `folder`, or none.

    A killed process leaves at most the hidden folder, whose name contains `MARK`.

    Args:
        folder: folder of the results.
        stem: name of the image without extension.
        force: replace existing files.

    Raises:
        InputError: a file exists and not `force`.
    """
    staging_folder = folder / f".{stem[:100]}{MARK}{uuid.uuid4().hex[:12]}"
    staging_folder.mkdir()
    try:
        yield staging_folder
        # the label map is last, so that its existence implies a complete image
        for file in sorted(
            staging_folder.iterdir(), key=lambda file: (file.stem.endswith("_seg"), file.name)
        ):
            if force:
                file.replace(folder / file.name)
            else:
                rename_new(file, folder / file.name)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
