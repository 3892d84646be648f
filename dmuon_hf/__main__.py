"""`python -m dmuon_hf`: the command line."""

import sys

from dmuon_hf.cli import main

sys.exit(main())
