"""`python -m vispe.train.linear`: linear segmentation from a recipe."""

import sys

from vispe.train.linear.command import main

if __name__ == "__main__":
    sys.exit(main())
