"""Segmenters of a run: trained on labels, by clustering or from text prompts, or those of an interrupted run."""

from vispe.errors import OptionError
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.model_file import Model, open_features
from vispe.segment.model.prediction import Segmenter
from vispe.segment.run.request import DEFAULT
from vispe.segment.run.run_state import Run
from vispe.segment.run.stored_inputs import use_stored_features
from vispe.segment.run.train import train, train_clusters
from vispe.segment.text.config import TextConfig


def resumed_segmenter(run: Run, model: Model) -> Segmenter:
    """Return the segmenter of an interrupted run from its model."""
    features = open_features(model, run.request.device, allow_download=True)
    features = use_stored_features(features, run.request.stored_features, run.images, run.reading)
    if run.request.labels and run.request.scoring.truth:
        run.training_labels()  # labelled pixels are excluded from the scores
    run.check_truth(None if run.request.cluster is not None else model.names)
    return Segmenter(model, features, run.post)


def trained_segmenter(run: Run) -> Segmenter:
    """Train on labels, find clusters, or encode text prompts."""
    request = run.request
    if request.text is not None:
        run.check_truth(request.text.names)
        from vispe.segment.run.zero_shot import text_model  # imports open_clip

        if request.stored_features is not None:
            raise OptionError("stored_features has no effect on text prompts. Omit it.")
        config = request.features or TextConfig()
        features, model = text_model(run, request.text, config, request.seed, request.device)
        return Segmenter(model, features, run.post)
    features = Features(request.features or DEFAULT, seed=request.seed, device=request.device)
    features = use_stored_features(features, request.stored_features, run.images, run.reading)
    if request.cluster is not None:
        clusters = PixelClusters(request.cluster, request.cluster_method, seed=request.seed)
        return Segmenter(train_clusters(run, features, clusters), features, run.post)
    return Segmenter(train(run, features), features, run.post)
