"""`python -m kvstow`: the command `kvstow`."""

import sys

from kvstow.cli import main

if __name__ == "__main__":
    sys.exit(main())
