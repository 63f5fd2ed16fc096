"""`python -m regauge` is `regauge`."""

import sys

from regauge.cli import main

if __name__ == "__main__":
    sys.exit(main())
