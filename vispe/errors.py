"""The errors that vispe raises. Each message says what was asked, what was found and what to do."""

import difflib
import re
from collections.abc import Iterable


class VispeError(Exception):
    """Root of every error that vispe raises on purpose."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would print the repr


class UnknownName(VispeError, KeyError):
    """A name (of an encoding, an option, a command, a model) that does not exist."""


class UnknownEncoding(UnknownName):
    """No encoding or preset of that name is registered."""


class OptionError(VispeError, ValueError):
    """An option has a value that is not accepted, or is not an option at all."""


class ShapeError(VispeError, ValueError):
    """A tensor, grid or image has a shape that the request cannot use."""


class UnsupportedHost(VispeError, TypeError):
    """The model is of a kind that vispe cannot convert."""


class UnsupportedCombination(VispeError, ValueError):
    """The parts are fine alone but not together."""


class EncodingMismatch(VispeError, RuntimeError):
    """Weights belong to another encoding than the model has; as all errors of loading, a RuntimeError too."""


class BackendUnavailable(VispeError, RuntimeError):
    """The named attention backend cannot serve the request."""


class MissingExtra(VispeError, ImportError):
    """An optional dependency is not installed."""


class InputError(VispeError, ValueError):
    """A file or value that the user gave cannot be used."""


def is_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's own, or one of torch, on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return (
        isinstance(error, RuntimeError) and re.search("allocate memory|out of memory", str(error)) is not None
    )


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ``" Did you mean 'x' or 'y'?"`` for the closest known names, or ``""``.

    Names that differ only in case, hyphens and underscores (``'M-RoPE-I'`` and ``'mrope_i'``) are suggested alone.
    """
    names = list(known)
    close = [n for n in names if _letters(n) == _letters(name)]
    close = close or difflib.get_close_matches(name, names, n=limit, cutoff=0.55)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).casefold()


def require(module: str, extra: str, purpose: str) -> None:
    """Raise `MissingExtra` with its install line when `module` cannot be imported.

    Args:
        module: import name, such as ``"sklearn"``.
        extra: the extra of vispe that brings it, such as ``"cli"``.
        purpose: what needs it, for the message.
    """
    import importlib.util

    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingExtra(
            f"{purpose} needs the package {module!r}, which is not installed; run: pip install 'vispe[{extra}]'"
        )


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_flag(option: str, value: object) -> None:
    """Raise `OptionError` unless `value` is true or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{option} is true or false, got {option}={value!r}.")


def check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `OptionError` unless the value is one of the choices."""
    if value not in choices:
        raise OptionError(f"{option} must be one of {', '.join(choices)}, got {value!r}.")
