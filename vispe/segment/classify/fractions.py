"""Area fractions as text: of a label map, and estimates with their intervals."""

from collections.abc import Mapping, Sequence


def map_words(fractions: Mapping[str, float | None]) -> str:
    """Return the fractions of a label map as text.

    Example:
        >>> map_words({"matrix": 0.789, "carbide": 0.211})
        'matrix 78.9 %, carbide 21.1 % of the map'
    """
    if None in fractions.values():
        return "no pixel has data"
    return (
        ", ".join(
            f"{name} {100 * fraction:.1f} %" for name, fraction in fractions.items() if fraction is not None
        )
        + " of the map"
    )


def estimate_words(fraction: float | None, bounds: Sequence[float] | None, unit: str = " %") -> str:
    """Return an estimated fraction with its 95 % interval as text.

    Example:
        >>> estimate_words(0.185, [0.048, 0.323]), estimate_words(0.01, [0, 0.04]), estimate_words(0.001, None)
        ('18.5 % (4.8 to 32.3)', '1.0 % (at most 4.0)', '0.1 % (no interval)')
    """
    if fraction is None:
        return "no data"
    if bounds is None:
        interval = "no interval"
    elif bounds[0] <= 0 or bounds[1] >= 1:
        interval = f"at most {100 * bounds[1]:.1f}" if bounds[0] <= 0 else f"at least {100 * bounds[0]:.1f}"
    else:
        interval = f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"
    return f"{100 * fraction:.1f}{unit} ({interval})"
