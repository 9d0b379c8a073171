"""Which classes there are, and the sentences that stand for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError
from vispe.images.labels.class_values import checked_names

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
"""Sentences that a phrase is put into, in place of ``{}``; none of them says which field it comes from."""

BACKGROUND = "background/empty area/dark background"
"""Phrases of the class that joins a single text."""

_NAME = "background"
_MOST = 255  # classes that a label image can hold


@dataclass(frozen=True)
class Prompts:
    """Classes and their sentences; JSON-able.

    Attributes:
        names: of the classes.
        phrases: for each class the phrases that mean it.
        templates: sentences with ``{}`` where a phrase goes.
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
        """Take classes as they are written on the command line.

        Args:
            texts: one for each class; ``/`` separates phrases that mean the same, ``"pore/hole"``.
            templates: sentences with ``{}``, or a text file with one in each line; `TEMPLATES` by default.
            background: phrases of a last class for everything else; ``'none'`` for no such class. By default there is
                one, with the phrases of `BACKGROUND`, where `texts` names a single class.

        Raises:
            OptionError: fewer than two classes, two of one name, an empty phrase, a template without ``{}``.
            InputError: the file of templates cannot be read.

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
                f"text needs 2 to {_MOST} classes to choose between, got {len(names)} ({listed}); name what else is in "
                "the image, or say what the background is with --background."
            )
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise OptionError(f"text names the class {twice[0]!r} twice; give each class one name.")
        checked_names("text", names)
        return cls(tuple(names), tuple(phrases), TEMPLATES if templates is None else _templates(templates))

    def sentences(self) -> list[list[str]]:
        """Return all sentences of each class: every phrase in every template."""
        return [[t.replace("{}", p) for p in of_class for t in self.templates] for of_class in self.phrases]


def prompts_or_none(
    text: Sequence[str] | None, *, only: Mapping[str, Any], never: Mapping[str, Any]
) -> Prompts | None:
    """Read the options of the command line that say texts; None where there is no text.

    Args:
        text: the classes.
        only: options that go with texts alone, by name: `templates` and `background` are read here.
        never: options that do not go with texts.

    Raises:
        OptionError: an option that would have no effect, or texts that are no classes.
    """
    for name, value in (only if text is None else never).items():
        if value is not None:
            what = "without --text" if text is None else "on --text"
            raise OptionError(f"{name}={value!r} has no effect {what}; leave it out.")
    return None if text is None else Prompts.read(text, only["templates"], only["background"])


def _phrases(text: str) -> tuple[str, ...]:
    phrases = tuple(" ".join(part.split()) for part in text.split("/"))
    if not all(phrases):
        raise OptionError(f"text={text!r} has an empty phrase; write a phrase, or several separated by '/'.")
    return tuple(dict.fromkeys(phrases))


def _templates(given: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Read templates from a list or from a file; a single text without ``{}`` is the name of a file."""
    lines = [given] if isinstance(given, str | Path) else list(given)
    if len(lines) == 1 and "{}" not in str(lines[0]):
        path = Path(lines[0])
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InputError(
                f"templates={str(path)!r} is neither a sentence with {{}} nor a text file ({reason}); write for "
                "example 'a micrograph of {}'."
            ) from error
        lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise OptionError("templates is empty; give one sentence with {} at least, or leave it out.")
    wrong = [line for line in lines if str(line).count("{}") != 1]
    if wrong:
        raise OptionError(f"the template {wrong[0]!r} needs {{}} once, where the phrase goes.")
    return tuple(str(line) for line in lines)
