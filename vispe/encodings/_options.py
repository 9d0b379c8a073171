"""Checks of options that many encodings have."""

from __future__ import annotations
