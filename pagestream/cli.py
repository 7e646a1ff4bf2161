"""The command `pagestream`: select a command and pass on its arguments. Imports nothing heavy, so --help is fast.

The commands of MODULES, and `bench`, are separate programs, which replace this process.
"""

import argparse
import hashlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pagestream.serve_settings import DEMO, ServeSettings, split_flags
from shared.setting_names import discard_unread_variables
from shared.settings import SettingsError, build_parser, load_settings
from shared.version import VERSION

MODULES = {
    "gateway": "gateway",
    "worker": "engine_worker",
    "batches": "gateway.batches.driver",
    "chat": "pagestream.chat",
    "run-batch": "pagestream.run_batch",
    "estimate": "engine_worker.estimate",
}
# The extra that each requires.
EXTRAS = {"gateway": "gateway", "worker": "engine", "batches": "gateway", "run-batch": "gateway"}
CLONE = Path(__file__).parents[1]  # root of the repository, if this is a clone
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # the names that gateway/auth/api_keys.py allows
SHELLS = ("bash", "zsh", "fish")
CONFIGURED = ("serve", "gateway", "worker", "batches")
_COMMANDS = """commands:
  serve [MODEL]   store, gateway and workers on this machine; MODEL: directory, .gguf file, ORG/NAME or `demo` (default)
  gateway         the HTTP gateway
  worker          one engine worker
  batches         run the batches of --files-dir; takes the options of the gateway
  chat            talk to a running server in the terminal
  run-batch       send a file of requests to a running server, at batch priority
  bench           measure an OpenAI-compatible server, or the engine (in a clone only)
  estimate MODEL  estimate the memory that a directory, .gguf file or `demo` needs, and how many sequences fit
  new-key NAME    create an API key and its entry for --api-keys-file
  dlq             requests that repeatedly crashed their workers: list, show, retry, drop
  queue           end the waiting requests of a model: clear MODEL
  top [URL]       show the KV blocks of a running server, live
  doctor          check this machine: Python, packages, torch, driver, Triton compiler, store, clock, port, model, disk
  config show     show every setting of serve, gateway, worker and batches with its value and origin
  completion      print the completion of a shell: bash, zsh or fish

`pagestream COMMAND --help` shows a command's options."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pagestream",
        description="LLM serving with paged KV memory.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pagestream {VERSION}")
    commands = ["serve", *MODULES, "bench", "new-key", "dlq", "queue", "top", "doctor", "config", "completion"]
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    args = parser.parse_args(argv)
    if args.command in MODULES:
        arguments = _with_directory(args.arguments) if args.command == "estimate" else args.arguments
        return _program(args.command, arguments) if arguments is not None else 1
    commands_here: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve, "bench": _bench, "new-key": _new_key, "dlq": _dlq, "queue": _queue, "top": _top,
        "doctor": _doctor, "config": _config, "completion": _completion,
    }  # fmt: skip
    return commands_here[args.command](args.arguments)


def _with_directory(arguments: list[str]) -> list[str] | None:
    """Replace `demo` or a .gguf file by its converted directory; None, with a message, if there is no such model."""
    if not arguments or not (arguments[0] == DEMO or arguments[0].endswith(".gguf")):
        return arguments
    from pagestream.gguf_model import ModelUnavailable  # noqa: PLC0415  asyncio takes 0.1 s, which --help does not need
    from pagestream.phases import PhaseConsole  # noqa: PLC0415
    from pagestream.served_models import prepared_directory  # noqa: PLC0415

    try:
        return [str(prepared_directory(arguments[0], PhaseConsole(sys.stderr))), *arguments[1:]]
    except ModelUnavailable as error:
        sys.stderr.write(f"pagestream estimate: {error}\n")
        return None


def _program(command: str, arguments: Sequence[str]) -> int:
    if command in EXTRAS:
        from pagestream.installation import missing_message  # noqa: PLC0415  reads the metadata of installed packages

        if lack := missing_message(EXTRAS[command]):
            return _refused(command, lack)
    return _become(MODULES[command], arguments)


def _bench(arguments: Sequence[str]) -> int:
    """Run the benchmarks, which are in a clone but not in the wheel."""
    if not (CLONE / "bench" / "__main__.py").is_file():
        return _refused("bench", "benchmarks are not part of the package; run it in a clone of the repository")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
    return _become("bench", arguments)


def _refused(command: str, why: str) -> int:
    sys.stderr.write(f"pagestream {command}: error: {why}\n")
    return 2


def _become(module: str, arguments: Sequence[str]) -> int:
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


def _serve(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(_serve_help())
        return 0
    discard_unread_variables(os.environ, "pagestream serve")
    # The model comes first, as in vLLM. Elsewhere a word could be the value of a child's flag.
    model = ["--model", arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    rest: list[str] = []
    try:
        loaded = load_settings(ServeSettings, [*model, *arguments], os.environ, prog="pagestream serve", unknown=rest)
        flags = split_flags(rest)
    except SettingsError as error:
        return _refused("serve", str(error))
    from pagestream.installation import missing_message  # noqa: PLC0415  reads the metadata of installed packages

    if lack := missing_message("serve", "gateway", "engine"):  # not [embedded], because the store may be remote
        return _refused("serve", lack)
    from pagestream.all_in_one import serve  # noqa: PLC0415  asyncio and redis take 0.2 s, which --help does not need

    return serve(loaded.settings, flags, loaded.config_path)


def _serve_help() -> str:
    parser = build_parser(ServeSettings, "pagestream serve [MODEL]")
    parser.epilog = (
        f"MODEL is the same as --model (default: {DEMO}). "
        "Every option of `pagestream gateway` and `pagestream worker` is accepted too."
    )
    return parser.format_help()


def _new_key(arguments: Sequence[str]) -> int:
    """Create a random API key and its entry for --api-keys-file.

    `pagestream new-key team-a >> keys.toml`: the key is shown once, on stderr, and not stored.
    """
    parser = new_key_parser()
    name = parser.parse_args(arguments).name
    if not _KEY_NAME.fullmatch(name):
        parser.error(f"name: expected 1 to 64 letters, digits, '.', '_', and '-'; got {name!r}")
    key = f"ps-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n\n')
    return 0


def new_key_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream new-key", description="Create an API key of the gateway.")
    parser.add_argument("name", help="name of the owner, shown in logs; its prompts share cached KV")
    return parser


def _doctor(arguments: Sequence[str]) -> int:
    from pagestream.doctor import main as examine  # noqa: PLC0415  for the same reason

    return examine(arguments)


def _top(arguments: Sequence[str]) -> int:
    from pagestream.top import main as show_blocks  # noqa: PLC0415  for the same reason

    return show_blocks(arguments)


def _dlq(arguments: Sequence[str]) -> int:
    from pagestream.dlq import main as dead_letters  # noqa: PLC0415  for the same reason

    return dead_letters(arguments)


def _queue(arguments: Sequence[str]) -> int:
    from pagestream.queue_command import main as queue  # noqa: PLC0415  for the same reason

    return queue(arguments)


def _config(arguments: Sequence[str]) -> int:
    parser = config_parser()
    args, flags = parser.parse_known_args(arguments)
    if flags and args.program is None:
        parser.error(f"{flags[0]}: name its program first: config show {{{','.join(CONFIGURED)}}} ...")
    show = [*flags, "--show-config", "json" if args.json else "text"]
    shown = {program: _show(program, show) for program in ([args.program] if args.program else CONFIGURED)}
    if args.json:
        sys.stdout.write(json.dumps({program: json.loads(text or "null") for program, text in shown.items()}, indent=2))
    else:
        sys.stdout.write("\n".join(f"[{program}]\n{text}" for program, text in shown.items()))
    return 0 if all(shown.values()) else 2


def config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagestream config", description="Every setting with its value and origin.")
    parser.add_argument("action", choices=["show"])
    parser.add_argument("program", nargs="?", choices=CONFIGURED, help="default: all of them")
    parser.add_argument("--json", action="store_true")
    return parser


def _completion(arguments: Sequence[str]) -> int:
    shell = completion_parser().parse_args(arguments).shell
    sys.stdout.write((Path(__file__).parent / "completions" / f"pagestream.{shell}").read_text(encoding="utf-8"))
    return 0


def completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagestream completion",
        description="Print the completion of a shell, for example: pagestream completion bash >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def _show(program: str, arguments: Sequence[str]) -> str:
    """Return the output of the program's --show-config; empty if the program refused its settings on stderr."""
    command = [MODULES[program]] if program in MODULES else ["pagestream", program]
    argv = [sys.executable, "-P", "-m", *command, *arguments]
    return subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True).stdout
