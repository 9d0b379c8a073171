"""Lengths as files write them, in microns."""

import numpy as np

MICRONS = {
    **dict.fromkeys(("µm", "μm", "um", "\\u00b5m", "micron", "microns", "micrometer", "micrometre"), 1.0),
    **{"nm": 1e-3, "pm": 1e-6, "å": 1e-4, "angstrom": 1e-4},
    **{"mm": 1e3, "cm": 1e4, "m": 1e6, "inch": 25_400.0, "in": 25_400.0},
}
"""Microns in one unit of length, by the lower-case names that microscopes and ImageJ write."""


def microns(value: object, unit: str) -> float | None:
    """Return a length in microns; None for what is no positive number or no unit of length.

    Example:
        >>> microns("5", "nm"), microns(2, "1/nm"), microns(0, "m")
        (0.005, None, None)
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    factor = MICRONS.get(str(unit).strip().lower())
    return number * factor if factor and np.isfinite(number) and number > 0 else None
