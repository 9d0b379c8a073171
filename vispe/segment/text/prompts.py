"""Text prompts: classes, and the sentences that describe each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError
from vispe.images.labels.class_names import checked_names

TEMPLATES = (
    "{}",
    "a micrograph of {}",
    "an image of {} under a microscope",
    "a light microscope image of {}",
    "an electron microscope image of {}",
    "a grayscale micrograph of {}",
    "a close-up of {}",
    "a texture of {}",
)
"""Prompt templates with ``{}`` for the phrase; none is specific to a field."""

BACKGROUND = "background/empty area/dark background"
"""Phrases of the background class that is added to a single class."""

_NAME = "background"
_MOST = 255  # upper bound of classes in a uint8 label image


@dataclass(frozen=True)
class Prompts:
    """Classes and their sentences; JSON-able.

    Attributes:
        names: class names.
        phrases: synonymous phrases of each class.
        templates: sentences with ``{}`` for a phrase.

    Raises:
        OptionError: `read` is called with fewer than two classes, equal names, or an empty phrase or template.
        InputError: `read` is called with a file of templates that cannot be read.

    Example:
        >>> Prompts.read(["pore/hole", "grain"]).names
        ('pore', 'grain')
    """

    names: tuple[str, ...]
    phrases: tuple[tuple[str, ...], ...]
    templates: tuple[str, ...] = TEMPLATES

    @classmethod
    def read(
        cls,
        texts: Sequence[str],
        templates: str | Path | Sequence[str] | None = None,
        background: str | None = None,
    ) -> Prompts:
        """Parse classes as written on the command line.

        Args:
            texts: one per class; ``/`` separates synonyms, ``"pore/hole"``.
            templates: sentences with ``{}``, or a text file with one per line; `TEMPLATES` by default.
            background: phrases of an additional class for everything else; ``'none'`` for no such class. By default it
                is added, with the phrases of `BACKGROUND`, if `texts` contains a single class.

        Raises:
            OptionError: there are fewer than two classes, names are duplicate, a phrase is empty, or a
                template has no ``{}``.
            InputError: the file of templates cannot be read.

        Example:
            >>> Prompts.read(["pore/hole", "grain"], ["an image of {}"]).sentences()
            [['an image of pore', 'an image of hole'], ['an image of grain']]
        """
        phrases = [_phrases(text) for text in texts]
        names = [of_class[0] for of_class in phrases]
        if background is None:
            background = BACKGROUND if len(names) == 1 else "none"
        if background != "none":
            phrases.append(_phrases(background))
            names.append(_NAME)
        if not 2 <= len(names) <= _MOST:
            listed = ", ".join(names) or "none"
            raise OptionError(
                f"text needs 2 to {_MOST} classes, got {len(names)} ({listed}). Name the other classes in "
                "the image, or describe the background with background."
            )
        duplicates = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if duplicates:
            raise OptionError(f"text names the class {duplicates[0]!r} twice. Use distinct names.")
        checked_names("text", names)
        return cls(tuple(names), tuple(phrases), TEMPLATES if templates is None else _templates(templates))

    def sentences(self) -> list[list[str]]:
        """Return all sentences of each class: every phrase in every template."""
        return [[t.replace("{}", p) for p in of_class for t in self.templates] for of_class in self.phrases]


def prompts_or_none(
    text: Sequence[str] | None, *, only: Mapping[str, Any], never: Mapping[str, Any]
) -> Prompts | None:
    """Create `Prompts` from command-line options; None without text.

    Args:
        text: the classes.
        only: options that apply to text only, by name; `templates` and `background` are used here.
        never: options that do not apply to text.

    Raises:
        OptionError: an option without effect, or invalid texts.
    """
    for name, value in (only if text is None else never).items():
        if value is not None:
            what = "without text" if text is None else "on text"
            raise OptionError(f"{name}={value!r} has no effect {what}. Omit it.")
    return None if text is None else Prompts.read(text, only["templates"], only["background"])


def _phrases(text: str) -> tuple[str, ...]:
    phrases = tuple(" ".join(part.split()) for part in text.split("/"))
    if not all(phrases):
        raise OptionError(f"text={text!r} has an empty phrase. Use a phrase, or several separated by '/'.")
    return tuple(dict.fromkeys(phrases))


def _templates(templates: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Read templates from a list or a file; a single text without ``{}`` is a file name."""
    lines = [templates] if isinstance(templates, str | Path) else list(templates)
    if len(lines) == 1 and "{}" not in str(lines[0]):
        path = Path(lines[0])
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InputError(
                f"templates={str(path)!r} is neither a sentence with {{}} nor a readable text file ({reason}). Use for "
                "example 'a micrograph of {}'."
            ) from error
        lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise OptionError("templates is empty. Pass at least one sentence with {}, or omit it.")
    wrong = [line for line in lines if str(line).count("{}") != 1]
    if wrong:
        raise OptionError(f"the template {wrong[0]!r} must contain {{}} exactly once.")
    return tuple(str(line) for line in lines)
