"""`python -m kvstow` runs the command `kvstow`."""

import sys

from kvstow.cli import main

if __name__ == "__main__":
    sys.exit(main())
