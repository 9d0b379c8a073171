"""`python -m vispe.train.vlm`: order invariance of a vision-language model from a recipe."""

import sys

from vispe.train.vlm.order_command import main

if __name__ == "__main__":
    sys.exit(main())
