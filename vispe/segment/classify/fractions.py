"""Area fractions in words: those of a label map, and estimates with their intervals."""

from collections.abc import Mapping, Sequence


def map_words(shares: Mapping[str, float | None]) -> str:
    """Return the fractions of a label map in words.

    >>> map_words({"matrix": 0.789, "carbide": 0.211})
    'matrix 78.9 %, carbide 21.1 % of the map'
    """
    if None in shares.values():
        return "no pixel holds data"
    return (
        ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share is not None)
        + " of the map"
    )


def estimate_words(share: float | None, ends: Sequence[float] | None, unit: str = " %") -> str:
    """Return an estimated fraction in words, with its 95 % interval.

    >>> estimate_words(0.185, [0.048, 0.323]), estimate_words(0.01, [0, 0.04]), estimate_words(0.001, None)
    ('18.5 % (4.8 to 32.3)', '1.0 % (at most 4.0)', '0.1 % (no interval)')
    """
    if share is None:
        return "no data"
    if ends is None:
        between = "no interval"
    elif ends[0] <= 0 or ends[1] >= 1:
        between = f"at most {100 * ends[1]:.1f}" if ends[0] <= 0 else f"at least {100 * ends[0]:.1f}"
    else:
        between = f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}"
    return f"{100 * share:.1f}{unit} ({between})"
