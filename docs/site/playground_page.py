"""Page to explore encodings: the figure of `vispe.explore` for a selection of them."""

from __future__ import annotations

import vispe

VARIANTS = {
    "alibi2d": (
        *("", ".geometric", ".local", "(slopes=harmonic)", "(metric=manhattan)", "(metric=chebyshev)"),
        *("(metric=squared)", "(wrap=false)", "(normalize=none)"),
    ),
    "gaussian2d": ("", "(wrap=true)"),
    "kerple": ("", ".power", "(metric=manhattan)", "(metric=chebyshev)", "(wrap=true)", "(normalize=max)"),
    "lookhere": ("", ".halves", ".eighths", "(distance=sqrt)", "(distance=square)"),
    "sandwich": ("", "(metric=manhattan)", "(metric=chebyshev)", "(wrap=true)", "(normalize=max)"),
    "rpb": ("",),
    "rope_axial": ("", "(temperature=10)", "(temperature=10000)", ".p_rope", ".flux", ".moonvit", ".minimax"),
    "rope_mixed": ("", "(rotate=false)"),
    "rope_dinov3": ("",),
    "sincos2d": ("",),
}

TEXT = """---
hide: [navigation, toc]
---

# Playground

Choose an encoding, then drag the query (the square) over a grid, or move it with the arrow keys. Each square
image is a head, and each patch shows its value for this query (dark grey: hidden): a bias as added to the
logits, a rotation as the similarity of equal queries and keys with random channels, and an additive encoding
as the cosine similarity of the added vectors.

FIGURE

- **image rotated by 90°** rotates the image with the query, and rotates the result back. If the encoding is
  invariant to quarter turns, nothing changes; **difference** shows what does.
- **16 x 16** has twice the patches along each axis. The query keeps its relative position.
- White is 0, or the bound next to it; blue is negative, orange positive. Learned parameters have their
  initial values (seed 0).
- A rotation belongs to the axes of the image, so the similarity changes with the image; a bias of distance does not.

## In a notebook

`vispe.explore` returns this figure for every encoding of images, [your own](how-to/models/own-encoding.md) included:

```python
import vispe

figure = vispe.explore('alibi2d', 'rope_axial(temperature=10)', sizes=(8, 14), num_heads=6)
figure                          # displayed by notebooks, or:
figure.save('explore.html', force=True)
```

A name alone adds the presets and option values that change the figure (`variants=False`: only itself). Grids
may have up to 32 x 32 patches. As a static figure: `vispe plot 'alibi2d(metric=manhattan)' -o bias.png`, or in a
notebook `vispe.plot_bias('alibi2d', (8, 8), query=(2, 5), head=0)`.

[All encodings](encodings/index.md) have a page with their formula and options;
[attention biases](explanation/attention-bias.md) and [rotations](explanation/rotations.md) explain what you see.
"""


def playground_page() -> str:
    """Return the page in Markdown and HTML, with the values of all encodings."""
    specs = [name + options for name, variants in VARIANTS.items() for options in variants]
    return TEXT.replace("FIGURE", vispe.explore(*specs, variants=False).fragment.replace("\n\n", "\n"))
