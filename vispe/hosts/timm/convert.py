"""Conversion of timm models; the steps are in `vispe.hosts.common.convert`."""

from __future__ import annotations

from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.common.convert import convert_model, describe_model, restore_model
from vispe.hosts.common.host_spec import HostSpec
from vispe.hosts.timm.families import family_of
from vispe.hosts.unwrap import unsupported_message, unwrap


def convert_timm(model: nn.Module, spec: HostSpec, built: bool = False) -> None:
    """Convert a timm model in place, or replace the encoding of a converted one.

    Args:
        model: a timm model of one of `vispe.hosts.timm.families.FAMILIES`.
        spec: the requested encodings.
        built: whether the model's constructor is still running, so that its own table and RoPE have not been
            used yet.

    Raises:
        UnsupportedHost, UnsupportedCombination: the model does not support the encoding.
    """
    model = unwrap(model)
    family = family_of(model)
    if family is None:
        raise UnsupportedHost(unsupported_message(model))
    convert_model(model, family, spec, built)


def restore_timm(model: nn.Module) -> None:
    """Restore the classes, absolute table and rotary embedding of a timm model; errors as in `vispe.restore`."""
    model = unwrap(model)
    restore_model(model, family_of(model))


def describe_timm(model: nn.Module) -> str:
    """Return a summary of a converted timm model."""
    return describe_model(model, family_of(model))
