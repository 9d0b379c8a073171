"""`python -m vispe` is the command `vispe`."""

import sys

from vispe.cli.main import main

sys.exit(main())
