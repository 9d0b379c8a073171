"""A folder of image files for the tests of sources."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.train.image_files import COLOUR, DEEP, GREY, STACK


@pytest.fixture
def folder(tmp_path):
    """Images of all kinds, damaged ones left aside."""
    (tmp_path / "b" / "deep.er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    Image.fromarray(COLOUR).save(tmp_path / "img10.png")
    Image.fromarray(GREY).save(tmp_path / "img2.PNG")
    Image.fromarray(np.dstack([COLOUR, COLOUR[..., :1]])).save(tmp_path / "rgba.png")
    Image.fromarray(DEEP).save(tmp_path / "b" / "deep16.png")
    tifffile.imwrite(tmp_path / "b" / "deep.er" / "stack.tif", STACK, photometric="minisblack")
    tifffile.imwrite(tmp_path / "b" / "deep.er" / "stack2.tif", STACK[:2] / np.float32(255))
    Image.fromarray(GREY).save(tmp_path / ".hidden" / "no.png")
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path
