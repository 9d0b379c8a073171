"""`convert`, `restore` and `describe` for models of every supported library."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from vispe.encodings.registry import Spec
from vispe.errors import OptionError
from vispe.hosts.common.conversion.convert import convert_model, converted_models, restore_model
from vispe.hosts.common.conversion.description import describe_model
from vispe.hosts.common.host_families import family_of, family_or_none, made_by
from vispe.hosts.common.host_spec import parse_host_spec
from vispe.hosts.contracts.check import LIBRARIES, check_contracts_of
from vispe.hosts.transformers.diagnosis import check_no_scheme
from vispe.hosts.transformers.version import check_version
from vispe.hosts.unwrap import unwrap, unwrap_all

M = TypeVar("M", bound=nn.Module)


def convert(
    model: M, spec: Spec | None = None, *, keep_abs: bool = False, keep_rope: bool = False, **options: Any
) -> M:
    """Replace the positional encoding of a model in place; all checks run before the first change.

    Weights keep their names, so stock checkpoints load strictly before or after. The spec names all position
    information of the converted model: its own absolute table and its own rotary embedding (of Eva and NaFlexVit) are
    detached until `restore`. So ``'none'`` removes all position information, unless `keep_abs` or `keep_rope`
    is set. A converted model can be converted again. A `UserWarning` is issued where `rope_axial` has less
    than half the temperature that the grid needs; `describe` reports any temperature that is too small.

    Example:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)
        >>> convert(model, 'alibi2d(slopes=learned)').vispe.spec
        [{'name': 'alibi2d', 'slopes': 'learned'}]

    Args:
        model: a timm `VisionTransformer` (DeiT distilled included), `Eva` or `NaFlexVit`; or a model of open_clip or
            its `visual`, whose image tower is converted; or a vision-language model of transformers (Qwen2-VL,
            Qwen2.5-VL, Qwen3-VL, LLaVA, LLaVA-OneVision, InternVL), where a position scheme goes into the language
            model and an encoding into the vision tower; or a vision model of transformers, with or without
            head (ViT, DeiT, ViTMSN, ViTMAE, I-JEPA, Pixio, BEiT, DINOv2, DINOv3, CLIP, SigLIP, SigLIP 2, SAM;
            VideoMAE and V-JEPA 2, with encodings of three axes); or timm's SAM and Swin, or torchvision's ViT
            and Swin, where each attention layer gets an encoding of its window. `torch.nn.DataParallel` and
            timm's ``features_only`` models are unwrapped; wrappers that have already registered parameters or
            compiled code are rejected.
        spec: name and options of an encoding or a position scheme, as text, dict or `Encoding` instance, or position
            schemes per layer (`vispe.multimodal.alternating`). A sum may name the model's own position information:
            ``learn`` is equivalent to `keep_abs`, ``rope`` to `keep_rope`, and either may be used alone.
            Weights of an `Encoding` are copied, into every layer if each layer has its own encoding. Without
            a spec, a model of transformers is converted to the encoding or scheme named by its configuration;
            only `vispe.from_pretrained` loads weights of an encoding.
        keep_abs: keep the model's own absolute table in addition to the encoding.
        keep_rope: keep the model's own rotary embedding in addition to the encoding.
        **options: options of the encoding or the scheme; for a scheme also ``late_rotation=True``, which rotates
            queries and keys inside the attention and caches keys without positions; ``parallel='graph_kv'`` or
            ``'pine'``, which makes adjacent images unordered; and ``self_extend=(group, window)``, which
            counts tokens beyond the window in groups.

    Returns:
        the same model.

    Raises:
        UnsupportedHost: the class of the model, or of one of its attention layers, is not supported, or its library
            no longer has a name that vispe needs.
        UnsupportedCombination: the model does not support the encoding.
        UnknownEncoding, OptionError: the spec is not valid.
        InputError: there is no spec, and the configuration of the model names none.
        MissingExtra: the model is from transformers, and its version is too old.
    """
    wrapper, model = model, unwrap(model)
    _check_libraries(model)
    if spec is None:
        _convert_named(model, {**options, "keep_abs": keep_abs, "keep_rope": keep_rope})
    elif host := _transformers(model):
        host.convert_transformers(model, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
    else:
        part = _part(model)
        family = family_of(part)
        check_no_scheme(model, spec)
        convert_model(part, family, parse_host_spec(spec, options, keep_abs, keep_rope))
    return wrapper


def _convert_named(model: nn.Module, options: dict[str, Any]) -> None:
    """Convert a model of transformers to the encoding and options that its configuration names."""
    passed = [name for name, value in options.items() if value]
    host = _transformers(model)
    if host is None or passed:
        got = (
            f"the options {', '.join(passed)}"
            if passed
            else f"a {type(model).__name__}, which has no configuration"
        )
        raise OptionError(
            "vispe.convert: without a spec, the encoding and its options are read from the configuration of a "
            f"transformers model, got {got}. Pass a spec, as in vispe.convert(model, 'alibi2d')."
        )
    host.convert_named(model)


def restore(model: M) -> M:
    """Restore the original classes, absolute table and rotary embedding of a converted model, in place.

    Outputs are bitwise equal to those before the conversion if no weight has changed; weights trained after
    the conversion are preserved.

    Example:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)
        >>> type(restore(convert(model, 'alibi2d')))
        <class 'timm.models.vision_transformer.VisionTransformer'>

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: the model was built with the encoding, so there is no table to restore.
        MissingExtra: the model is from transformers, and its version is too old.
    """
    wrapper, model = model, unwrap(model, "restore")
    if host := _transformers(model):
        host.restore_transformers(model)
    else:
        part = _part(model)
        restore_model(part, family_or_none(part))
    return wrapper


def describe(model: nn.Module) -> str:
    """Return a human-readable summary of a converted model: encodings, parameters, backends; nested models included.

    Raises:
        MissingExtra: the model is from transformers, and its version is too old.

    Example:
        >>> import timm
        >>> print(describe(timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2, pos_embed='alibi2d')))
        VisionTransformer with {'name': 'alibi2d'}
          grid (2, 2), trained at (2, 2), 1 prefix token
          absolute table: none
          pos_enc: alibi2d, 0 parameters
          in eager mode on fewer than 1024 tokens, the fixed bias is a dense mask of the model's own attention
          2 attention layers swapped; backend auto
    """
    model = unwrap_all(model)
    if host := _transformers(model):
        return host.describe_transformers(model)
    texts = [(name, describe_model(m, family_of(m))) for name, m in converted_models(model)]
    if texts:
        return "\n".join(f"{name}: {text}" if name else text for name, text in texts)
    return f"{type(model).__name__} without an encoding of vispe; vispe.convert(model, 'alibi2d') adds one."


def _check_libraries(model: nn.Module) -> None:
    """Raise an error if a library of the model is too old, or does not have the names on which vispe relies."""
    if made_by(model, "transformers"):
        check_version()
    classes = {cls for kind in {type(module) for module in model.modules()} for cls in kind.__mro__}
    modules = {cls.__module__ for cls in classes}
    libraries = {module.partition(".")[0] for module in modules}
    check_contracts_of(*(name for name in LIBRARIES if name in libraries), modules=modules)


def _part(model: nn.Module) -> nn.Module:
    """Return the module that is converted: the image tower of a model of open_clip, else the model itself."""
    if not made_by(model, "open_clip"):
        return model
    from vispe.hosts.open_clip.convert import image_tower

    return unwrap(image_tower(model))


def _transformers(model: nn.Module) -> Any:
    """Return the module that converts models of transformers, imported on demand; None for other models.

    Raises:
        MissingExtra: the installed version of transformers is too old.
    """
    if made_by(model, "open_clip") or not made_by(model, "transformers"):
        return None
    check_version()
    from vispe.hosts.transformers import convert as host

    return host
