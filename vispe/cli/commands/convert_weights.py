"""`vispe convert-weights`: released checkpoints with vispe's names."""

from typing import Literal

POSITIONALS = ("src", "dst")


def convert_weights(
    src: str,
    dst: str,
    from_: Literal["dino-saw", "rope-vit", "deit-irpe", "convit", "cpvt", "twins"] | None = None,
    num_heads: int | None = None,
    spec: str | None = None,
    key: str | None = None,
    force: bool = False,
    json: bool = False,
) -> None:
    """Rename the weights of a released checkpoint to vispe's names.

    The kind is recognised by the names: learned slopes of dino-saw (blocks.0.attn.m), mixed rotation of rope-vit
    (freqs), tables of DeiT with iRPE (blocks.0.attn.rpe_k.lookup_table_weight), gates of ConViT
    (blocks.0.attn.gating_param), convolutions of CPVT and Twins (pos_block.0.proj.weight). Everything else keeps its
    name. The report says with which pos_embed the file loads.

    Args:
        src: the checkpoint, a file of safetensors or torch; only tensors and plain values are read from it.
        dst: the file to write; its name ends in .safetensors, .pt, .pth or .bin.
        from_: what the checkpoint is, when it is not to be recognised.
        num_heads: heads of the model, where the weights do not tell; one per 64 channels by default.
        spec: the encoding, where it is none that was published.
        key: where the state dict is in a file of a training program; state_dict or model by default.
        force: overwrite DST.
        json: print the report as JSON.

    Examples:
        vispe convert-weights deit_tiny_irpe.pth deit_tiny_irpe.safetensors
        vispe convert-weights mixed.pth mixed.safetensors --from rope-vit --num-heads 6
    """
    from json import dumps
    from pathlib import Path

    from vispe.errors import InputError
    from vispe.files import atomic_path, check_writable
    from vispe.hosts.checkpoints import released, weight_files

    if not Path(src).is_file():
        raise InputError(f"There is no file {src}.")
    if Path(dst).suffix not in weight_files.SUFFIXES:
        raise InputError(
            f"{dst} must end in {', '.join(weight_files.SUFFIXES)}, which says the format to write."
        )
    check_writable([dst], force, protect=[src])
    weights, rest = weight_files.read_weights(src, key)
    done = released.convert_weights(weights, from_, num_heads=num_heads, spec=spec)
    with atomic_path(dst, force) as temporary:
        weight_files.write_weights(temporary, done.weights, note=done.specs[0])
    if json:
        report = {
            "kind": done.kind,
            "pos_embed": list(done.specs),
            "renamed": [list(pair) for pair in done.renamed],
            "dropped": list(done.dropped),
            "kept": done.kept,
            "left_out": rest,
            "notes": list(done.notes),
            "written": dst,
        }
        print(dumps(report, indent=2))
        return
    print(f"{src} is a {done.kind} checkpoint")
    for old, new in done.renamed:
        print(f"  {old} -> {new}")
    for name in done.dropped:
        print(f"  {name} dropped: computed from the grid")
    for name in rest:
        print(f"  {name} left out: not part of the state dict")
    for note in done.notes:
        print(f"  {note}")
    print(f"{dst}: {len(done.renamed)} entries renamed, {done.kept} kept")
    print(f"load it with pos_embed={' or '.join(repr(s) for s in done.specs)}")
