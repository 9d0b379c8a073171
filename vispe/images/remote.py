"""Zarr stores at URLs (`https://`, `s3://`, `gs://`, `memory://` ...), read through fsspec."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vispe.errors import InputError, OptionError, require, short

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MODULES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_METADATA = ("zarr.json", ".zattrs", ".zgroup", ".zarray")
_ERRORS = (OSError, ValueError, TypeError, LookupError, ImportError, RuntimeError)
"""Exceptions of fsspec (protocols, options), of zarr (metadata) and of numcodecs (chunks)."""

# base classes that are not derived from OSError: connections, credentials and responses
_LIBRARY_ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
_OPTIONS: dict[str, Any] = {}  # of the current run; in memory only, since they may contain credentials


class StoreURL(type(Path())):  # type: ignore[misc] - the concrete class of the platform
    """URL of a store, which takes the role of its path; its text is the URL.

    Raises:
        InputError: the URL contains a user name or password, or a query.
    """

    def __new__(cls, url: "str | StoreURL") -> "StoreURL":
        """Create a path whose name is that of the store."""
        url = str(url).rstrip("/")
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query:
            raise InputError(
                f"{url.replace(parts.netloc, '...') if '@' in parts.netloc else url.partition('?')[0]}: a URL must not "
                "contain credentials or a query. Pass credentials as `storage_options`, or in the environment."
            )
        self = super().__new__(cls, url)
        self.url = url
        return self

    def __init__(self, url: "str | StoreURL") -> None:
        # from Python 3.12 on, the parts of a path are set here
        super().__init__(*([str(url).rstrip("/")] if sys.version_info >= (3, 12) else []))

    def __str__(self) -> str:
        return getattr(self, "url", None) or super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreURL, (self.url,)

    def with_segments(self, *segments: str | Path) -> Path:
        """Return an ordinary path for parents and joined paths (from Python 3.12 on)."""
        return Path(*segments)

    def resolve(self, strict: bool = False) -> "StoreURL":
        """Return the URL itself."""
        return self


def is_url(name: str | Path) -> bool:
    """Return whether a name is a URL.

    Example:
        >>> is_url("s3://bucket/a.zarr"), is_url("skimage:coins"), is_url("a.zarr")
        (True, False, False)
    """
    return isinstance(name, StoreURL) or (isinstance(name, str) and _URL.match(name) is not None)


@contextmanager
def storage_options(options: Mapping[str, Any] | str | Path | None) -> Iterator[None]:
    """Use options of fsspec for all URLs in a `with` block.

    Args:
        options: mapping, or a JSON object as text or in a file, such as '{"anon": true}'; None for the defaults.

    Raises:
        OptionError: not a JSON object.
    """
    _OPTIONS.clear()
    _OPTIONS.update(_parsed(options))
    try:
        yield
    finally:
        _OPTIONS.clear()


def _parsed(options: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    if options is None or isinstance(options, Mapping):
        return options or {}
    text = str(options)
    # the text is not repeated in messages: it may contain a password
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        kind = type(error).__name__
        raise OptionError(
            f"`storage_options` must be a JSON object or a file that contains one ({kind}). Pass for example "
            "'{\"anon\": true}'."
        ) from error
    if not isinstance(value, dict):
        raise OptionError(
            f"`storage_options` must be a JSON object, got a {type(value).__name__}. Pass for example "
            "'{\"anon\": true}'."
        )
    return value


def options_of(url: str | Path) -> dict[str, Any]:
    """Return the fsspec options of a URL: those of the run; access to buckets is anonymous without credentials.

    Raises:
        MissingExtra: fsspec, or the package of the protocol, is not installed.
    """
    scheme = urlsplit(str(url)).scheme.lower()
    for module in ("fsspec", _MODULES.get(scheme, "fsspec")):
        require(module, "remote", f"reading {scheme}:// URLs")
    options = dict(_OPTIONS)
    if scheme == "s3" and not options and not _has_aws_credentials():
        return {"anon": True}
    if scheme in ("gs", "gcs") and not options and "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ:
        return {"token": "anon"}
    return options


def _has_aws_credentials() -> bool:
    """Return whether the environment or a file of the AWS command line provides credentials."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE")
    names += ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    return any(name in os.environ for name in names) or Path("~/.aws/credentials").expanduser().is_file()


def read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which a URL turns out to be unreadable; memory that runs out is not one of them."""
    # a library that is not imported cannot raise
    modules = [(sys.modules[module], name) for module, name in _LIBRARY_ERRORS if module in sys.modules]
    return (*_ERRORS, *(getattr(module, name) for module, name in modules))


def unreadable(url: str | Path, error: BaseException) -> InputError:
    """Return the error for a URL that cannot be read."""
    name, reason = type(error).__name__, short(error, 200)
    text = name if reason == name else f"{name}: {reason}"
    return InputError(f"{url} cannot be read ({text}). Check the address, the network and `storage_options`.")


def fingerprint_url(url: "StoreURL") -> str:
    """Return a fingerprint of a remote store: its URL and metadata; changes of pixels alone are not detected.

    Raises:
        InputError: the store cannot be reached.
    """
    options = options_of(url)
    import fsspec

    digest = hashlib.sha256(str(url).encode())
    try:
        system, path = fsspec.url_to_fs(str(url), **options)
        for name in _METADATA:
            try:
                digest.update(name.encode() + system.cat_file(f"{path}/{name}"))
            except FileNotFoundError:
                continue
    except read_errors() as error:
        raise unreadable(url, error) from error
    return digest.hexdigest()
