"""Exceptions of vispe. Messages name the argument, the value and a remedy."""

import difflib
import re
from collections.abc import Iterable


class VispeError(Exception):
    """Base class of all exceptions raised by vispe.

    Example:
        >>> try:
        ...     raise OptionError("num_heads must be 1 or more, got 0.")
        ... except VispeError as error:
        ...     print(error)
        ...
        num_heads must be 1 or more, got 0.
    """

    def __str__(self) -> str:
        # KeyError would return the repr of the message
        return str(self.args[0]) if self.args else ""


class UnknownName(VispeError, KeyError):
    """An unknown name of an encoding, option, command or model."""


class UnknownEncoding(UnknownName):
    """An unknown name of an encoding or preset."""


class OptionError(VispeError, ValueError):
    """An invalid value of an option, or an unknown option."""


class ShapeError(VispeError, ValueError):
    """An invalid shape of a tensor, grid or image."""


class UnsupportedHost(VispeError, TypeError):
    """A model that vispe does not support."""


class UnsupportedCombination(VispeError, ValueError):
    """Arguments that are each valid but not supported together."""


class EncodingMismatch(VispeError, RuntimeError):
    """A state dict for another encoding than that of the model; a RuntimeError, as in `load_state_dict`."""


class BackendUnavailable(VispeError, RuntimeError):
    """An attention backend that does not support the call."""


class MissingExtra(VispeError, ImportError):
    """An optional dependency is not installed."""


class InputError(VispeError, ValueError):
    """A file or value from the user that cannot be used."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is an out-of-memory error of Python or torch, on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return (
        isinstance(error, RuntimeError) and re.search("allocate memory|out of memory", str(error)) is not None
    )


_PLURALS = {"axis": "axes", "index": "indices"}


def counted(n: object, noun: str) -> str:
    """Return a count and its noun, singular for 1: ``"1 axis"``, ``"2 axes"``, ``"0 labelled pixels"``.

    torch.compile cannot trace it with symbolic sizes, so attention uses it only where an error is raised.

    Args:
        n: the count, an integer or its text (``"1 or 2"``, ``"1,000"``).
        noun: the noun in the singular, with its adjectives.
    """
    if str(n) == "1":
        return f"{n} {noun}"
    *adjectives, last = noun.split(" ")
    if last in _PLURALS:
        plural = _PLURALS[last]
    elif re.search("[^aeiou]y$", last):
        plural = f"{last[:-1]}ies"
    else:
        plural = last + ("es" if re.search("(s|x|ch|sh)$", last) else "s")
    return " ".join([str(n), *adjectives, plural])


def short(error: BaseException, limit: int = 300) -> str:
    r"""Return the message of an error of another library on one line, without the colours of a terminal.

    >>> short(ValueError("\x1b[1mno such\nfile.\x1b[0m"))
    'no such file'
    """
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text[:limit].rstrip(".") or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return ``" Did you mean 'x' or 'y'?"`` for the closest known names, or ``""``.

    Names that differ only in case, hyphens and underscores (``'M-RoPE-I'`` and ``'mrope_i'``) take precedence.
    """
    names = list(known)
    close = [n for n in names if _normalized(n) == _normalized(name)]
    close = close or difflib.get_close_matches(name, names, n=limit, cutoff=0.55)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def _normalized(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).casefold()


def require(module: str, extra: str, purpose: str) -> None:
    """Raise `MissingExtra` with the install command if `module` is not installed.

    Args:
        module: import name, such as ``"sklearn"``.
        extra: extra of vispe that includes it, such as ``"cli"``.
        purpose: the feature that needs it, for the message.

    Raises:
        MissingExtra: `module` is not installed.
    """
    import importlib.util

    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingExtra(
            f"{purpose} needs the package {module!r}, which is not installed; run: pip install 'vispe[{extra}]'"
        )


def is_integer(value: object) -> bool:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_flag(option: str, value: object) -> None:
    """Raise `OptionError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise OptionError(f"{option} is true or false, got {option}={value!r}.")


def check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `OptionError` unless the value is one of the choices."""
    if value not in choices:
        raise OptionError(f"{option} must be one of {', '.join(choices)}, got {value!r}.")
