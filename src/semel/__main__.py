"""`python -m semel`: the same as the command `semel`."""

import sys

from semel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
