"""One line of `pagestream doctor`: what was looked at, how it is, and what would help."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    check: str
    status: Literal["ok", "warn", "fail"]
    message: str
    hint: str = ""
