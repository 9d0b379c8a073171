"""No positional information: the baseline."""

from vispe.encodings.base import Encoding
from vispe.encodings.registry import register


@register
class NoEncoding(Encoding):
    """No position information: the transformer processes a set of patches.

    Shapes: nothing is added.
    New resolution: nothing to do.   Cost: none.
    Invariant to: every permutation of the patches.
    Differs from the reference: there is none.

    Example:
        >>> from vispe import create_encoding
        >>> create_encoding("none").config
        {'name': 'none'}
    """

    name = "none"
    ndim = (1, 2, 3)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    fused = True
