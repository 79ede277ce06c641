"""A job that never ends: it says which process it is, in its answer, and waits."""

import os
import sys
import time
from pathlib import Path

Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
