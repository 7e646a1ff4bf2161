"""pagestream new-key NAME: a random API key for the eyes, and its entry for the file of --api-keys-file.

pagestream new-key team-a >> keys.toml      # the key itself goes to the terminal (stderr), once and nowhere else
"""

import argparse
import hashlib
import re
import secrets
import sys
from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as gateway/auth/api_keys.py allows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pagestream new-key", description="Make an API key of the gateway.")
    parser.add_argument("name", help="whose it is: shown in logs, and the tenant whose prompts share cached KV")
    name = parser.parse_args(argv).name
    if not _NAME.fullmatch(name):
        parser.error(f"name {name!r}: expected 1 to 64 of letters, digits, '.', '_' and '-'")
    key = f"ps-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n\n')
    return 0
