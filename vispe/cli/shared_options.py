"""Help of options that several commands share, written once; the docstring of a command describes its own options."""

IMAGE = {
    "channel": "channels to use, by number (from 0) or name, separated by commas.",
    "z": "page (from 0) or range a:b of a stack.",
    "axes": "order of the stored axes, such as ZYX; overrides the metadata of the file.",
    "scene": "scene to read from CZI, LIF, ND2, DM3, DM4 and HDF5 files, by name or number (from 0).",
    "orientation": (
        "stored (default) reads the pixels as Fiji, napari and ilastik do; tag applies the orientation tag of "
        "the file, as web browsers and labelme do."
    ),
    "crop": (
        "rows and columns of the sample, such as 0:884,0:1024, or :-64,: to exclude an information bar at the "
        "bottom; other pixels are excluded from all numbers and are 0 in label maps."
    ),
    "mask": (
        "image file with 0 for pixels to exclude from all numbers; one for all images, or several matched by "
        "name."
    ),
}

LABELS = {
    "classes": "names of the classes 1, 2, ..., separated by commas.",
    "legend": "JSON file with class names by number, grey level or colour.",
    "label_page": "page of the stack (from 0) that single-page labels belong to.",
}

TRUTH = {
    "truth_zero": "whether the value 0 in a mask is the first class, or is excluded from the score.",
    "truth_page": "page of the stack (from 0) that a single-page mask belongs to.",
}

RESULT = {
    "prior": (
        "class prior, estimated on each page without labels. sqrt uses its square root (default, safe), em "
        "the full estimate, uniform no prior, which overestimates rare classes. Fractions in the report use "
        "the full estimate unless prior is uniform."
    ),
    "clean": (
        "smooth class probabilities along the edges of the image (guided filter, radius 4 px): removes specks "
        "and moves boundaries to edges. Helps if classes differ in grey level; removes structures smaller "
        "than the radius."
    ),
    "smooth": "average probabilities over squares of this radius, in pixels.",
    "min_area": "connected regions with fewer pixels are assigned the class of their surroundings.",
}

OBJECTS = {
    "objects": (
        "classes, by name or number, whose connected regions are objects: writes an object map and a table "
        "for each image, and objects.csv for all; counts and sizes are in report.json. Objects of Z stacks "
        "are 3D."
    ),
    "touching": (
        "split (default) separates touching objects at their necks, for grains or nuclei; keep treats each "
        "connected region as one object, for networks and branches."
    ),
    "object_min_area": "objects with fewer pixels are excluded; their number is in the report; default 10.",
    "fill_holes": "count holes as part of the object around them; the label map is unchanged.",
    "exclude_border": "exclude objects that touch the border of the image or pixels without data (crop, mask, NaN).",
    "objects_as": (
        "object files for other programs: geojson (QuPath), rois (ImageJ), coco, separated by commas."
    ),
}

REPORTS = {
    "materials": (
        "measure quantities of materials science on each page: mean intercepts and their direction, ASTM E112 "
        "grain size number, interfaces, two-point correlation, with intervals; curves are written to a table "
        "per image."
    ),
    "trust": (
        "report how much the result depends on the pose of the sample: segments the image rotated, mirrored "
        "and shifted as well; takes about 13 times as long (for stacks, only the middle page is tested)."
    ),
}

FEATURES = {
    "clip": "the two percentiles that are mapped to black and white; default 0.5,99.5.",
    "stored_features": (
        "folder of vispe features with the model outputs of the same images, which are read instead of computed; "
        "features of other images, options or versions are refused."
    ),
}

MODEL = {
    "model": (
        "timm model name, open_clip:NAME/TAG, hf:FOLDER of a transformers model, folder of a retrofit, saved segmenter "
        "(.vispe), vispe_micro, or a Python callable, package.module:name or file.py:name."
    ),
    "weights": "checkpoint file, or random; default the pretrained weights.",
    "pos_embed": "positional encoding that replaces the model's own, such as alibi2d.",
    "img_size": "input size of the model in pixels, for models with a fixed input size.",
    "images": "images, folders or wildcards; every page of a stack counts as an image.",
    "masks": (
        "ground-truth label files, matched to the images by name (a.png with a.png or a_mask.png), otherwise by order."
    ),
    "zero": "whether the value 0 in a mask is the first class, or is ignored.",
    "page": "page (from 0) of a stack; default the middle one.",
    "batch_size": "images per forward pass; larger is faster on a GPU and needs more memory.",
}

RUN = {
    "seed": "seed of all random numbers.",
    "device": "auto, cpu, cuda, cuda:1 ...; auto uses cuda if available.",
    "force": "overwrite existing files.",
    "json": "print the results as JSON.",
    "tile": "side of the tiles in which an image is processed, in pixels.",
    "memory": (
        "memory limit for OME-Zarr stores and large TIFF files, in addition to the libraries; default 2 GiB."
    ),
    "scheduler": (
        "address of a dask scheduler, such as tcp://host:8786, whose workers segment the blocks of a store."
    ),
    "storage_options": (
        "options of fsspec for images at URLs, as a JSON object or a file that contains one, such as "
        "'{\"anon\": true}'; default credentials of the environment, and anonymous access to s3:// and gs:// "
        "without any. They are never stored."
    ),
}

SHARED: dict[str, str] = {
    **IMAGE, **LABELS, **TRUTH, **RESULT, **OBJECTS, **REPORTS, **FEATURES, **MODEL, **RUN
}  # fmt: skip
"""Help of each shared option; a command that describes an option in its docstring replaces it."""
