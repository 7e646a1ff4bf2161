"""`pagestream completion` prints scripts that complete every flag of every command."""

import re
import subprocess
import sys

import pytest

from pagestream.cli import SHELLS, main
from pagestream.serve_settings import SET_BY_SERVE
from tests.docs.completions import COMPLETIONS, completions

# Completes the last word of the given command line, as bash does at a Tab.
COMPLETE = """
source /dev/stdin
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9
_shtab_pagestream pagestream "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_match_the_programs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = (COMPLETIONS / f"pagestream.{shell}").read_text()
    assert script.rstrip() == completions()[shell].rstrip(), "run python -m tests.docs.completions"
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == script


def completed(*words: str) -> set[str]:
    script = (COMPLETIONS / "pagestream.bash").read_text()
    command = ["bash", "-c", COMPLETE, "bash", "pagestream", *words]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("program", ["serve", "gateway", "worker", "batches"])
def test_tab_completes_all_flags(program: str) -> None:
    command = [sys.executable, "-m", "pagestream", program, "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"^  (--[a-z0-9-]+)", help_text, re.M))
    assert len(flags) > 15
    assert flags - completed(program, "--") == set()


def test_serve_completes_flags_of_its_programs_but_not_those_that_it_sets() -> None:
    offered = completed("serve", "--")
    assert {"--max-num-streams", "--block-size", "--redis-url"} <= offered
    assert not offered & SET_BY_SERVE


def test_tab_completes_commands_and_choices() -> None:
    assert {"serve", "worker", "completion"} <= completed("")
    assert completed("completion", "") >= set(SHELLS)
    assert {"auto", "fp8"} <= completed("worker", "--kv-cache-dtype", "")
