"""What a check of `pagestream doctor` found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of `pagestream doctor`: the check, its result, and a fix."""

    check: str
    status: Literal["ok", "warn", "fail"]
    message: str
    hint: str = ""
