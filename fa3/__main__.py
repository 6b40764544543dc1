"""`python -m fa3`."""

import sys

from fa3.cli import main

if __name__ == "__main__":
    sys.exit(main())
