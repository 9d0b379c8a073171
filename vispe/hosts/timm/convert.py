"""Putting an encoding into a timm model, and taking it out again; the steps are in `vispe.hosts.common.convert`."""

from __future__ import annotations

from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.common.convert import in_words, put_in, take_out
from vispe.hosts.common.host_spec import Wanted
from vispe.hosts.timm.families import family_of
from vispe.hosts.unwrap import unknown, unwrapped


def convert_timm(model: nn.Module, wanted: Wanted, built: bool = False) -> None:
    """Convert a timm model in place, or exchange the encoding of a converted one.

    Args:
        model: a timm model of one of `vispe.hosts.timm.families.FAMILIES`.
        wanted: what the spec asks.
        built: whether the model is being built with the encoding, so that its own table and rope never counted.

    Raises:
        UnsupportedHost, UnsupportedCombination: the encoding has no place in it.
    """
    model = unwrapped(model)
    family = family_of(model)
    if family is None:
        raise UnsupportedHost(unknown(model))
    put_in(model, family, wanted, built)


def restore_timm(model: nn.Module) -> None:
    """Give a timm model its own classes, absolute table and rotary embedding back; errors as of `vispe.restore`."""
    model = unwrapped(model)
    take_out(model, family_of(model))


def describe_timm(model: nn.Module) -> str:
    """Return what is attached where in a converted timm model, in a few lines."""
    return in_words(model, family_of(model))
