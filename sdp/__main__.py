"""`python -m sdp` is `sdp`."""

import sys

from sdp.cli import main

sys.exit(main())
