r"""Formulas of the encodings in LaTeX, converted to MathML when the site is built.

Docstrings contain them in ASCII; a page shows both. MathML needs neither scripts nor fonts of another server.
Lines of one formula are separated by a double backslash.
"""

from __future__ import annotations

import re

from vispe.encodings.registry import encoding_class


def shown(name: str) -> str:
    """Return the formula of an encoding as Markdown, or '' if its docstring has none."""
    return "".join(f"$$\n{line}\n$$\n\n" for line in encoding_class(name).formula.split(r" \\ ") if line)


def mathml(html: str) -> str:
    r"""Return a page whose formulas, as `pymdownx.arithmatex` marks them, are MathML.

    >>> mathml(r'<span class="arithmatex">\(x^2\)</span>').startswith('<math')
    True
    """
    from html import unescape

    from latex2mathml.converter import convert  # comes with the extra docs

    def converted(match: re.Match[str]) -> str:
        latex = unescape(match[2]).strip()
        # a long line of its own is scrolled, not the page
        return (
            convert(latex)
            if match[1] == "span"
            else f'<div class="formula">{convert(latex, display="block")}</div>'
        )

    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', converted, html, flags=re.DOTALL
    )
