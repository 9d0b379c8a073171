"""ASTM E112 grain size numbers from mean lineal intercepts."""

import math

from vispe.utils.options import PositiveFloat, checked


@checked
def grain_size_number(mean_intercept_mm: PositiveFloat) -> float:
    """Return the ASTM grain size number G of a mean lineal intercept.

    G = -6.643856 log10(l) - 3.288, l in millimetres on the sample (magnification 1)   ASTM E112-13, table 6
    The numbers of the standard's table 4 follow: 0.320 mm is G 0, 56.6 um is G 5, 10.0 um is G 10.

    Args:
        mean_intercept_mm: length in mm on the sample; pixels without a size have no G.

    Raises:
        OptionError: a length that is not positive.

    Example:
        >>> round(grain_size_number(0.0566), 1)
        5.0
    """
    return -6.643856 * math.log10(mean_intercept_mm) - 3.288
