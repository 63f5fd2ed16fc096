"""`python -m regauge` is `regauge`."""

import gc
import sys

from regauge.cli import main


def program() -> int:
    """Run a command as a whole process; return its exit code.

    What is left is not searched for garbage before it goes: of all that torch and transformers make
    when they are imported, that is 1.5 s of a processor.
    """
    try:
        return main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(program())
