"""The command `pagestream`: finds the command and hands the rest over. Imports nothing heavy, so --help is quick.

`gateway`, `worker` and `bench` are programs of their own: this process becomes them. Only `serve`, `doctor` and
`config` live in this package, and `new-key`.

It runs before any walk. It knows the commands by their names, and none of their options.
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
from shared.settings import SettingsError, build_parser, load_settings
from shared.version import VERSION

MODULES = {
    "gateway": "gateway",
    "worker": "engine_worker",
    "chat": "pagestream.chat",
    "run-batch": "pagestream.run_batch",
    "estimate": "engine_worker.estimate",
}
EXTRAS = {"gateway": "gateway", "worker": "engine", "run-batch": "gateway"}  # what each cannot do without
CLONE = Path(__file__).parents[1]  # if this is one
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as gateway/auth/api_keys.py allows
CONFIGURED = ("serve", "gateway", "worker")
_COMMANDS = """commands:
  serve [MODEL]   store, gateway and workers on this machine; MODEL: directory, .gguf file, ORG/NAME or `demo` (default)
  gateway         the HTTP gateway alone
  worker          one engine worker alone
  chat            talk to a running server in the terminal
  run-batch       a file of requests through a running server, behind all others
  bench           measure an OpenAI-compatible server, or the engine alone (in a clone only)
  estimate MODEL  what a model takes of a device's memory, and how many sequences fit beside it
  new-key NAME    make an API key of the gateway and its entry for --api-keys-file
  dlq             requests that kept killing their workers: list, show, retry, drop
  queue           end the requests that wait for a model: clear MODEL
  top [URL]       the KV blocks of a running server, live in this terminal
  doctor          check this machine: Python, packages, torch, driver, Triton compiler, store, clock, port, model, disk
  config show     every setting of serve, gateway and worker with its value and origin

`pagestream COMMAND --help` tells a command's options."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pagestream",
        description="LLM serving with paged KV memory.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pagestream {VERSION}")
    commands = ["serve", *MODULES, "bench", "new-key", "dlq", "queue", "top", "doctor", "config"]
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    args = parser.parse_args(argv)
    if args.command in MODULES:
        return _program(args.command, args.arguments)
    commands_here: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve, "bench": _bench, "new-key": _new_key, "dlq": _dlq, "queue": _queue, "top": _top,
        "doctor": _doctor, "config": _config,
    }  # fmt: skip
    return commands_here[args.command](args.arguments)


def _program(command: str, arguments: Sequence[str]) -> int:
    if command in EXTRAS:
        from pagestream.installation import missing_message  # noqa: PLC0415  reads the metadata of what is installed

        if lack := missing_message(EXTRAS[command]):
            return _refused(command, lack)
    return _become(MODULES[command], arguments)


def _bench(arguments: Sequence[str]) -> int:
    """The benchmarks are not in the wheel; a clone has them beside this package."""
    if not (CLONE / "bench" / "__main__.py").is_file():
        return _refused("bench", "the benchmarks are part of the repository, not of the package: run it in a clone")
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
    # The model comes first, as in vLLM; anywhere else a word could be the value of a flag that only a child knows.
    model = ["--model", arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    rest: list[str] = []
    try:
        loaded = load_settings(ServeSettings, [*model, *arguments], os.environ, prog="pagestream serve", unknown=rest)
        flags = split_flags(rest)
    except SettingsError as error:
        return _refused("serve", str(error))
    from pagestream.installation import missing_message  # noqa: PLC0415  reads the metadata of what is installed

    if lack := missing_message("serve", "gateway", "engine"):  # a store can be elsewhere
        return _refused("serve", lack)
    from pagestream.all_in_one import serve  # noqa: PLC0415  asyncio and redis cost 0.2 s, which --help does not need

    return serve(loaded.settings, flags, loaded.config_path)


def _serve_help() -> str:
    parser = build_parser(ServeSettings, "pagestream serve [MODEL]")
    parser.epilog = (
        f"MODEL is the same as --model (default: {DEMO}). "
        "Every option of `pagestream gateway` and `pagestream worker` can be given too."
    )
    return parser.format_help()


def _new_key(arguments: Sequence[str]) -> int:
    """A random API key for the eyes, and its entry for the file of --api-keys-file.

    `pagestream new-key team-a >> keys.toml`: the key itself goes to the terminal (stderr), once and nowhere else.
    """
    parser = argparse.ArgumentParser(prog="pagestream new-key", description="Make an API key of the gateway.")
    parser.add_argument("name", help="whose it is: shown in logs, and the tenant whose prompts share cached KV")
    name = parser.parse_args(arguments).name
    if not _KEY_NAME.fullmatch(name):
        parser.error(f"name {name!r}: expected 1 to 64 letters, digits, '.', '_', and '-'")
    key = f"ps-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n\n')
    return 0


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
    parser = argparse.ArgumentParser(prog="pagestream config", description="Every setting with its value and origin.")
    parser.add_argument("action", choices=["show"])
    parser.add_argument("program", nargs="?", choices=CONFIGURED, help="default: all of them")
    parser.add_argument("--json", action="store_true")
    args, flags = parser.parse_known_args(arguments)
    if flags and args.program is None:
        parser.error(f"name the program that {flags[0]} belongs to: config show {{{','.join(CONFIGURED)}}} ...")
    show = [*flags, "--show-config", "json" if args.json else "text"]
    shown = {program: _show(program, show) for program in ([args.program] if args.program else CONFIGURED)}
    if args.json:
        sys.stdout.write(json.dumps({program: json.loads(text or "null") for program, text in shown.items()}, indent=2))
    else:
        sys.stdout.write("\n".join(f"[{program}]\n{text}" for program, text in shown.items()))
    return 0 if all(shown.values()) else 2


def _show(program: str, arguments: Sequence[str]) -> str:
    """Return the program's own account of its settings; empty if it refused them, which it then has said on stderr."""
    command = [MODULES[program]] if program in MODULES else ["pagestream", program]
    argv = [sys.executable, "-P", "-m", *command, *arguments]
    return subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True).stdout
