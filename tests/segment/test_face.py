"""What `from vispe.segment import ...` gives."""

import subprocess
import sys

import pytest

import vispe.segment
from tests.cases import cases


@cases("name", vispe.segment.__all__)
def test_names_of_the_face(name):
    assert getattr(vispe.segment, name).__name__ == name
    assert name in dir(vispe.segment)


@pytest.mark.slow  # in the fast suite with a test of tests/cli/test_main.py
def test_importing_the_face_is_light():
    code = "import sys, vispe.segment; print([m for m in ('scipy', 'sklearn', 'skimage', 'zarr') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
