"""From features of pixels to classes: classifiers, clusters, priors, smoothing."""
