"""`python -m poem` is the command `poem`."""

import sys

from poem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
