"""Small images in stores, their scribbles, and predictions of the same pages in memory."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vispe.images.normalize import normalize
from vispe.images.read import Micrograph
from vispe.segment.model.prediction import predict_page
from vispe.segment.types import PostProcessing

zarr = pytest.importorskip("zarr", reason="needs the extra vispe[big]")
ome_format = pytest.importorskip("ome_zarr.format", reason="needs the extra vispe[big]")
ome_writer = pytest.importorskip("ome_zarr.writer", reason="needs the extra vispe[big]")

TYPES = {"t": "time", "c": "channel"}


def write_store(
    path, array, axes="yx", version="0.5", chunk=50, names=(), scale=0.5, unit="micrometer", levels=1
):
    """Write an OME-Zarr image with zarr and ome-zarr only."""
    root = zarr.create_group(store=str(path), zarr_format=3 if version == "0.5" else 2)
    datasets = []
    for level in range(levels):
        level_array = array[..., :: 2**level, :: 2**level]
        chunks = (*(1,) * (array.ndim - 2), chunk, chunk)
        root.create_array(str(level), shape=level_array.shape, chunks=chunks, dtype=array.dtype)[...] = (
            level_array
        )
        size = [*[1.0] * (array.ndim - 2), scale * 2**level, scale * 2**level]
        datasets.append({"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": size}]})
    axes_metadata = [
        {"name": name, "type": TYPES.get(name, "space"), **({"unit": unit} if name in "yx" and unit else {})}
        for name in axes
    ]
    ome_writer.write_multiscales_metadata(
        root, datasets[::-1], fmt=ome_format.format_from_version(version), axes=axes_metadata
    )
    if names:
        omero = {"channels": [{"label": name} for name in names]}
        if version == "0.5":
            root.attrs["ome"] = {**root.attrs["ome"], "omero": omero}
        else:
            root.attrs["omero"] = omero
    return path


def scene(height=157, width=211, seed=0):
    """Make a noisy image of two phases -> image (h, w) float64 in 0..180, phase (h, w) bool."""
    y, x = np.mgrid[:height, :width]
    phase = np.sin(x / 11) * np.sin(y / 14) > 0.1
    return phase * 110.0 + np.random.default_rng(seed).random((height, width)) * 70, phase


def scribbled(path, phase, share=0.01, seed=5):
    """Write labels of a few pixels as PNG."""
    values = np.where(phase, 1, 2) * (np.random.default_rng(seed).random(phase.shape) < share)
    Image.fromarray(values.astype(np.uint8)).save(path)
    return path


def in_memory(pages, model, features, post=None, path=Path("page")):
    """Segment pages (z, h, w, c) in memory, as for image files."""
    micrograph = Micrograph(path, np.ascontiguousarray(pages))
    grey, _ = normalize(micrograph, model.normalize, model.clip)
    return [
        predict_page(
            page,
            valid,
            features,
            model.classifier,
            post or PostProcessing(),
            lambda share: None,
            model.domain,
        )
        for page, valid in zip(grey, micrograph.valid, strict=True)
    ]


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))
