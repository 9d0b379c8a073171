"""JSON files of class names and scribbles: strict parsing with messages that name the file."""

import json
from pathlib import Path

from vispe.errors import InputError
from vispe.images.paths import check_file

_JSON_BYTES = 200_000_000


def load_json(path: Path) -> object:
    """Parse a JSON file.

    Raises:
        InputError: unreadable, too large, or invalid JSON; the message includes the file and the line.
    """
    check_file(path)
    if path.stat().st_size > _JSON_BYTES:
        raise InputError(
            f"{path} must be at most {_JSON_BYTES // 1_000_000} MB for a list of names or scribbles."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}.") from error
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=reject_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON: {error.msg} in line {error.lineno}.") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply for a list of names or scribbles.") from error
    except ValueError as error:  # raised by the two hooks, or by an integer of thousands of digits
        raise InputError(f"{path} is not valid: {str(error).partition(';')[0]}.") from error


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict; raise ValueError for duplicate keys."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r} in an object")
    return content


def reject_constant(text: str) -> object:
    """Raise ValueError for NaN and infinity, which JSON does not allow."""
    raise ValueError(f"{text} is not a JSON number")
