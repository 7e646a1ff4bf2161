"""`python -m pagestream` is `pagestream`: it begins before every walk, and knows cli.py alone."""

import sys

from pagestream.cli import main

if __name__ == "__main__":
    sys.exit(main())
