"""Training of a classifier of objects, from examples of object classes."""

from dataclasses import replace

from vispe.errors import InputError, counted
from vispe.images.labels.label_files import Labels, read_label_set
from vispe.segment.model.prediction import Segmenter
from vispe.segment.objects.examples import Example, classes_of_examples, classes_of_labels, read_examples
from vispe.segment.objects.object_classes import ObjectClassifier
from vispe.segment.objects.object_files import find_image_objects
from vispe.segment.objects.table import Row
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.image_pipeline import predict
from vispe.segment.run.inputs import BatchImage, is_table


def train_objects(run: Batch, by: Segmenter) -> Segmenter:
    """Segment the images with examples of object classes, and add a classifier of objects to the model.

    Raises:
        InputError: examples that match no image or no object, or fewer than two classes.
    """
    options, names = run.request.objects, by.model.names
    options = replace(options, classes=[names[number - 1] for number in options.numbers(names)])
    examples = _examples(run)
    rows: list[Row] = []
    labels: list[str] = []
    run.watch.start("learning object classes", len(examples))
    for image, examples_of_image in examples:
        grey = run.pages(image, by.features)
        results = predict(grey, by, lambda _: None, run.note)
        instances, objects = find_image_objects(grey.image, results, names, options)
        if isinstance(examples_of_image, Labels):
            classes, notes = classes_of_labels(
                examples_of_image.values, examples_of_image.names, instances, image.path
            )
            for text in (*examples_of_image.notes, *notes):
                run.note(text)
        else:
            classes = classes_of_examples(examples_of_image, instances, objects.rows, image.path)
        rows += [objects.rows[number - 1] for number in classes]
        labels += classes.values()
        run.watch.step(1)
    class_names = {name for _, each in examples if isinstance(each, Labels) for name in each.names}
    for name in sorted(class_names - set(labels)):
        run.note(f"object class {name!r} has no labelled object and is omitted.")
    classifier = ObjectClassifier.fit(rows, labels, options, run.request.seed)
    for text in classifier.notes():
        run.note(text)
    notes = {
        **by.model.notes,
        "object_classes": {"files": [str(f) for f in run.examples], **classifier.facts},
    }
    return replace(by, model=replace(by.model, objects=classifier, notes=notes))


def _examples(run: Batch) -> list[tuple[BatchImage, list[Example] | Labels]]:
    """Read the examples of object classes of each image that has any."""
    if not is_table(run.examples[0]):
        images = [image for image in run.images if image.object_classes is not None]
        read = [micrograph for _, micrograph in run.each(images)]
        shapes, frames = [each.pages.shape[:3] for each in read], [each.frame for each in read]
        images = [image for image in images if image in run.images]
        paths = [image.path for image in images]
        labels = read_label_set(
            [i.object_classes for i in images], shapes, images=paths, frames=frames, thin=False
        )
        return list(zip(images, labels, strict=True))
    examples = [example for path in run.examples for example in read_examples(path)]
    if len(run.images) > 1 and (anonymous := [e for e in examples if not e.image]):
        raise InputError(
            f"{anonymous[0].where}: there are {counted(len(run.images), 'image')}, but the table does not name the "
            "image. Add a column image with file names."
        )
    by_image = [(image, [e for e in examples if e.is_of(image.path)]) for image in run.images]
    unmatched = [e for e in examples if not any(e.is_of(image.path) for image in run.images)]
    if len(unmatched) == len(examples):
        raise InputError(
            f"{unmatched[0].where}: {unmatched[0].image} is not an image of this run, such as "
            f"{run.images[0].path.name}. Correct the column image."
        )
    if unmatched:
        run.note(f"{counted(len(unmatched), 'example')} of object classes of other images are ignored.")
    return [(image, of_image) for image, of_image in by_image if of_image]
