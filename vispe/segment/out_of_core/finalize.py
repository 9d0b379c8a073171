"""From the probabilities of the classifier, once all of a page are there, to weighed ones, labels and uncertainty.

What classes are weighed by depends on the whole page, and is found from sums of whole numbers: the same bits as in
memory, in whatever order blocks were finished.
"""

import json
from pathlib import Path

import numpy as np

from vispe.segment.classify.class_prior import count, merge
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core import progress
from vispe.segment.out_of_core.block_engine import few_at_once, grown_by
from vispe.segment.out_of_core.image_source import BigImage, open_image
from vispe.segment.out_of_core.job import Job
from vispe.segment.run.prediction import Areas, Post, find_areas, settle


def area_of_page(job: Job, image: BigImage, page: int) -> Areas:
    """Estimate the frequencies of the classes on a page, and with them the areas, or recall them."""
    work = Path(job.work)
    kept = work / f"areas.{page}.json"
    if kept.is_file():
        pixels, doubt, prior, unweighed = (np.array(values) for values in json.loads(kept.read_text()))
        return Areas(pixels, doubt, (prior,), unweighed)
    whole = None
    for region in progress.chunk_regions(image, job.chunk):
        part = count(progress.read_raw(work, page, region))
        whole = part if whole is None else merge([whole, part])
    found = find_areas(whole)
    values = (found.pixels, found.doubt, found.priors[0], found.unweighed)
    progress.write_small(kept, [each.tolist() for each in values])
    return found


def settle_block(text: str, page: int, ends: tuple[int, int, int, int]) -> None:
    """Settle one block of a job (as JSON), write it and record it; a task of a cluster."""
    job, region = Job.loads(text), Region(*ends)
    with few_at_once():
        image = open_image(job.image, channel=job.channel, z=job.z, axes=job.axes)
        grown = grown_by(region, job.smooth, *image.shape)
        prob = progress.read_raw(Path(job.work), page, grown)
        valid = prob.any(0)
        prior = None if job.priors is None else np.array(job.priors[page])
        post = Post(job.smooth, prior=job.prior)
        labels, uncertainty = settle(prob, valid, post, prior)
        top, left = region.top - grown.top, region.left - grown.left
        crop = slice(top, top + region.shape[0]), slice(left, left + region.shape[1])
        found = prob[(slice(None), *crop)], labels[crop], uncertainty[crop]
        progress.write_settled(job, image, page, region, found)
