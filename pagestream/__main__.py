"""Entry point of `python -m pagestream`."""

import sys

from pagestream.cli import main

if __name__ == "__main__":
    sys.exit(main())
