"""Final step of out-of-core runs: from the classifier's probabilities of a page to labels and uncertainty.

The class prior depends on the complete page, and is computed from integer sums: bitwise identical to the result in
memory, for any order of blocks.
"""

import json
from pathlib import Path

import numpy as np

from vispe.segment.classify.probability_histogram import count, merge
from vispe.segment.features.tiles import Region
from vispe.segment.model.post_processing import finalize
from vispe.segment.model.prediction import estimate_areas
from vispe.segment.out_of_core import progress
from vispe.segment.out_of_core.block_engine import grown_by, limit_concurrency
from vispe.segment.out_of_core.job import Job
from vispe.segment.out_of_core.lazy_page import PageWindow
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.types import Areas, PostProcessing


def area_of_page(job: Job, image: OutOfCoreImage, page: int) -> Areas:
    """Estimate the class frequencies and areas of a page, or load them."""
    work = Path(job.work)
    cache_file = work / f"areas.{page}.json"
    if cache_file.is_file():
        pixels, doubt, prior, unweighed = (np.array(values) for values in json.loads(cache_file.read_text()))
        return Areas(pixels, doubt, (prior,), unweighed)
    total = None
    for region in progress.chunk_regions(image, job.chunk):
        part = count(progress.read_raw(work, page, region))
        total = part if total is None else merge([total, part])
    page_areas = estimate_areas(total)
    values = (page_areas.pixels, page_areas.doubt, page_areas.priors[0], page_areas.unweighed)
    progress.write_small(cache_file, [each.tolist() for each in values])
    return page_areas


def finalize_block(text: str, page: int, bounds: tuple[int, int, int, int]) -> None:
    """Finalise, write and record one block of a job (as JSON); a task of a cluster."""
    job, region = Job.loads(text), Region(*bounds)
    with limit_concurrency():
        image = open_image(job.image, channel=job.channel, z=job.z, axes=job.axes)
        grown = grown_by(region, job.smooth, *image.shape)
        prob = progress.read_raw(Path(job.work), page, grown)
        valid = prob.any(0)
        prior = None if job.priors is None else np.array(job.priors[page])
        post = PostProcessing(job.smooth, job.min_area, job.prior, job.clean)
        grey = PageWindow(image, page, job.limits[page]).cut(grown)[0].mean(-1) if job.clean else None
        labels, uncertainty, has_large_component = finalize(prob, valid, post, prior, grey)
        top, left = region.top - grown.top, region.left - grown.left
        crop = slice(top, top + region.shape[0]), slice(left, left + region.shape[1])
        result = prob[(slice(None), *crop)], labels[crop], uncertainty[crop]
        progress.write_final(job, image, page, region, result, has_large_component)
