"""Versions of vispe and of the libraries that affect results."""

import functools

__version__ = "0.3.0"

_LIBRARIES = ("numpy", "scipy", "scikit-learn", "scikit-image", "torch", "timm", "open_clip_torch", "skops")


@functools.cache
def _library_versions() -> tuple[str, ...]:
    # read once per process: each search of the installed packages takes a few milliseconds
    from importlib.metadata import version

    return tuple(map(version, _LIBRARIES))


def versions() -> dict[str, str]:
    """Return the versions of vispe and of the libraries that affect segmentations."""
    return {"vispe": __version__, **dict(zip(_LIBRARIES, _library_versions(), strict=True))}
