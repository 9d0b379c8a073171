"""Public names of `vispe.segment`."""

import subprocess
import sys

import pytest

import vispe.segment
from tests.cases import cases


@cases("name", vispe.segment.__all__)
def test_public_names_can_be_imported(name):
    assert getattr(vispe.segment, name).__name__ == name
    assert name in dir(vispe.segment)


@pytest.mark.slow  # in the fast suite with a test of tests/cli/test_main.py
def test_import_loads_no_heavy_packages():
    code = "import sys, vispe.segment; print([m for m in ('scipy', 'sklearn', 'skimage', 'zarr') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
