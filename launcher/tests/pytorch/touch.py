"""Makes a file that is named after the rank."""

import os
import pathlib
import sys

pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
