"""Old names of modules, which answer with a DeprecationWarning until version 0.3; pickles read them too."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FOLDERS = {  # moved whole
    "vispe.micro": "vispe.backbones.micro",
    "vispe.napari": "vispe.segment.napari",
    "vispe.evaluate.textures": "vispe.images.textures",
    "vispe.evaluate.attention_bench": "vispe.evaluate.speed",
}
# package: module=where it is now, below vispe; with +, its names are in several modules
_TEXT = """
-: base=encodings.base frequencies=grid.frequencies layers=encodings.layer micro=backbones.micro
  napari=segment.napari registry=encodings.registry saved_spec=encodings.saved spec_text=encodings.spec
attention: content=attention.bias.content+attention.bias.decomposed+attention.bias.values
  distance=attention.bias.distances flex=attention.backends.flex lowrank=attention.backends.lowrank
  reference=attention.backends.reference
  rotation=attention.transform.pairs+attention.transform.base+attention.transform.blocks+attention.transform.affine
  sdpa=attention.backends.sdpa selection=attention.preference strip_gradient=attention.backends.blocked
  table=attention.bias.table triton=attention.backends.triton
encodings: _alibi=encodings.parts.slopes _comrope=encodings.parts.skew _comrope_base=encodings.parts.comrope
  _coords=encodings.parts.coords _fourier=encodings.parts.fourier _grape=encodings.parts.rank2
  _gta=encodings.parts.frames _irpe=encodings.parts.buckets _kept=encodings.parts.kept _loope=encodings.parts.curves
  _options=errors _regrid=encodings.parts.regrid _rope=encodings.parts.rope _rpb=encodings.parts.tables
  _seqpe=encodings.parts.digit_tokens _seqpe_encoder=encodings.parts.digits
  _seqpe_losses=encodings.parts.digit_losses alibi=encodings.bias.alibi alibi2d=encodings.bias.alibi2d
  alibi3d=encodings.bias.alibi3d comrope_ap=encodings.rotary.comrope_ap comrope_ld=encodings.rotary.comrope_ld
  fourier=encodings.additive.fourier fourier_learned=encodings.additive.fourier_learned
  gaussian2d=encodings.bias.gaussian2d grape=encodings.rotary.grape grape_alibi=encodings.bias.grape_alibi
  grape_path=encodings.bias.grape_path gta=encodings.rotary.gta irpe=encodings.bias.irpe
  learned=encodings.additive.learned liere=encodings.rotary.liere lightnet=encodings.rotary.lightnet
  loope=encodings.additive.loope none=encodings.mixing.none peg=encodings.mixing.peg
  rope_axial=encodings.rotary.rope_axial rope_dinov3=encodings.rotary.rope_dinov3
  rope_mixed=encodings.rotary.rope_mixed rpb=encodings.bias.rpb rpb_cpb=encodings.bias.rpb_cpb
  seqpe=encodings.rotary.seqpe seqpe_input=encodings.additive.seqpe_input
  shifted_gaussian=encodings.additive.shifted_gaussian sincos2d=encodings.additive.sincos2d
  sincos3d=encodings.additive.sincos3d sincos3d_points=encodings.additive.sincos3d_points
  spder=encodings.additive.spder
evaluate: attention_bench=evaluate.speed attention_maps=backbones.attention backbone=backbones.timm+backbones.tokens
  debias=evaluate.probe.debias extrapolation=evaluate.behaviour.extrapolation
  head_report=evaluate.attention.head_result head_sums=evaluate.attention.head_sums health=evaluate.attention.heads
  health_plots=evaluate.attention.head_plots linear=evaluate.probe.fit pesi=evaluate.features.pesi
  plots_positions=evaluate.plots.positions probe_averages=evaluate.probe.averages
  probe_axes=evaluate.probe.pictures.axes+report.style probe_baselines=evaluate.probe.remedies
  probe_curves=evaluate.probe.pictures.curves probe_layers=evaluate.probe.layers
  probe_page=evaluate.probe.pictures.page probe_plots=evaluate.probe.pictures.sheet
  probe_remedies=evaluate.probe.remedy_table probe_remedy_plots=evaluate.probe.pictures.remedies
  probe_run=evaluate.probe.run probe_sources=evaluate.probe.sources probe_trials=evaluate.probe.trials
  ramps=evaluate.probe.ramps reinit=evaluate.attention.reinit report=report.page textures=images.textures
  three_cell_table=evaluate.three_cell.table three_cell_train=evaluate.three_cell.train
evaluate.rotation: angles=evaluate.rotation.questions.angles+evaluate.rotation.plan callables=backbones.callables
  clusters=evaluate.rotation.questions.clusters controls=evaluate.rotation.questions.controls
  drawing=evaluate.rotation.pictures.style+report.style examples=evaluate.rotation.pictures.examples
  features=evaluate.rotation.questions.features files=images.sequences
  fingerprint=evaluate.rotation.questions.fingerprint group=symmetry.d4
  groups=evaluate.rotation.questions+evaluate.rotation.steps
  labels=segment.metrics+symmetry.labels+evaluate.rotation.plan layers=evaluate.rotation.questions.layers
  lie=evaluate.rotation.questions.lie model=backbones.maps models_plot=evaluate.rotation.pictures.models
  page=evaluate.rotation.pictures.page page_labels=evaluate.rotation.pictures.label_sections
  page_parts=evaluate.rotation.pictures.parts page_sections=evaluate.rotation.pictures.sections
  plots=evaluate.rotation.pictures.rows polar=evaluate.rotation.pictures.polar
  poses=evaluate.rotation.questions.accuracy quadrant=evaluate.rotation.questions.quadrant+evaluate.rotation.steps
  result=evaluate.rotation.rows+report.table saved=evaluate.saved scores=evaluate.rotation.questions.scores
  segmentation=evaluate.rotation.questions.segmentation
  sharing=evaluate.rotation.processes+backbones.processes sources=evaluate.sources
  statistics=report.statistics stream=backbones.batches subject=evaluate.subject
  translation=evaluate.rotation.questions.shifts+evaluate.rotation.plan warp=symmetry.warp
evaluate.textures: checks=images.textures.arguments
hosts: cache=hosts.transplant.cache context=hosts.transplant.context fitting=hosts.transplant.fitting
  front_door=hosts.timm.front_door hf=hosts.transformers.convert hf_adapters=hosts.transformers.saving.adapters
  hf_call=hosts.transformers.language.call hf_classes=hosts.transformers.classes
  hf_front_door=hosts.transformers.saving.front_door hf_given=hosts.transformers.language.position_ids
  hf_index=hosts.transformers.language.rope_index hf_late=hosts.transformers.language.late
  hf_loading=hosts.transformers.saving.loading hf_pictures=hosts.transformers.language.pictures
  hf_positioned=hosts.transformers.language.classes hf_record=hosts.transformers.saving.record
  hf_signature=hosts.transformers.language.signature hf_state=hosts.transformers.language.state
  hf_version=hosts.transformers.version hf_vision=hosts.transformers.vision.convert
  hf_vision_attention=hosts.transformers.vision.attention hf_vision_chunks=hosts.transformers.vision.chunks
  hf_vision_family=hosts.transformers.vision.family hf_vision_tower=hosts.transformers.vision.tower
  hf_vlm=hosts.transformers.language.convert loading=hosts.transplant.loading
  open_clip_attention=hosts.open_clip.attention open_clip_names=hosts.open_clip.names
  open_clip_tower=hosts.open_clip.tower paths=hosts.explain refusals=hosts.timm.refusals
  released=hosts.checkpoints.released timm_attention=hosts.timm.attention timm_convert=hosts.timm.convert
  timm_eva=hosts.timm.eva timm_family=hosts.timm.family timm_hosted=hosts.timm.hosted timm_naflex=hosts.timm.naflex
  timm_vit=hosts.timm.vit traced=hosts.transplant.traced twins=hosts.transplant.twins
  weight_files=hosts.checkpoints.files
multimodal: _typed=multimodal.streams.typed from_ids=multimodal.streams.from_ids merging=multimodal.streams.merging
  options=multimodal.sections segments=multimodal.streams.segments
  stream=multimodal.streams.stream+multimodal.streams.blocks stream_text=multimodal.streams.text
  streaming=multimodal.streams.translation
segment: batch=segment.run.batch calibrate=segment.classify.calibrate claim=segment.run.claim
  cluster=segment.classify.cluster companions=images.companions decode=images.formats.decoded+images.formats.decode
  dense=segment.features.dense disk=segment.run.disk downloads=backbones.hub filters=segment.features.filters
  filters3d=segment.features.filters3d foreign=images.formats.foreign
  guards=images.formats.guards+images.formats.metadata+images.formats.damage headers=images.formats.headers
  images=images.read+images.find+images.normalize inputs=segment.run.inputs kept=segment.features.kept
  labels=images.labels.read levels=images.labels.levels maps=segment.features.maps modelcheck=segment.model.check
  modelfile=segment.model.file outputs=images.write+files paths=images.paths png16=images.formats.decode
  predict=segment.run.predict prior=segment.classify.prior report=segment.run.report resume=segment.run.resume
  scoring=segment.run.scoring shelf=segment.features.shelf smooth=segment.classify.smooth
  spectral=segment.classify.spectral staging=segment.run.staging strokes=images.labels.strokes
  tiff=images.formats.tiff tiles=segment.features.tiles tokens=segment.features.tokens+backbones.hub+backbones.timm
  train=segment.run.train workers=segment.features.workers
segment.big: work=segment.big.state
train: backbone=backbones.tokens+backbones.maps checkpoint=train.retrofit.checkpoint config=train.retrofit.config
  config_check=train.retrofit.check evaluate_checkpoint=train.evaluate.checkpoint
  evaluate_criteria=train.evaluate.criteria evaluate_masks=train.evaluate.masks evaluate_page=train.evaluate.page
  evaluate_pictures=train.evaluate.pictures evaluate_plots=train.evaluate.plots
  evaluate_report=train.evaluate.result linear_data=train.linear.data linear_model=train.linear.model
  linear_task=train.linear.task linear_train=train.linear.train log=train.retrofit.log loop=train.retrofit.loop
  lora=train.retrofit.lora losses=train.retrofit.losses measure=train.retrofit.measure models=train.retrofit.student
  processes=backbones.processes recipe=train.retrofit.recipe recipe_files=train.retrofit.recipes
  teacher=train.retrofit.teacher
"""


def _table() -> dict[str, list[str]]:
    """Return the modules that hold the names of each old module."""
    table, package = {}, ""
    for word in _TEXT.split():
        if word.endswith(":"):
            package = "vispe." + word[:-1].lstrip("-")
            continue
        old, _, new = word.partition("=")
        table[f"{package.rstrip('.')}.{old}"] = [f"vispe.{name}" for name in new.split("+")]
    return table


MOVED = _table()


def now(name: str) -> list[str]:
    """Return the modules that hold what the module `name` held; an empty list where it never moved."""
    for old, new in _FOLDERS.items():
        if name not in MOVED and (name == old or name.startswith(f"{old}.")):
            return [new + name[len(old) :]]
    return MOVED.get(name, [])


class _Old(ModuleType):
    """A module under its old name."""

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):
            for module in now(self.__name__):
                try:
                    return getattr(importlib.import_module(module), name)
                except AttributeError:
                    continue
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Finder(MetaPathFinder, Loader):
    """Asked last, when no module of that name exists."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=name in _FOLDERS) if now(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Old(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        homes = " and ".join(now(module.__name__))
        text = f"{module.__name__} is now {homes}; the old name goes with vispe 0.3."
        warnings.warn(text, DeprecationWarning, stacklevel=2)


def await_old_names() -> None:
    """Let imports of old names find the new modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
