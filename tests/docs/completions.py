"""The completions of `pagestream completion`: python -m tests.docs.completions writes them, a test compares them."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from engine_worker import estimate
from engine_worker.settings import WorkerSettings
from gateway.batches.driver.settings import DriverSettings
from gateway.settings import GatewaySettings
from pagestream import chat, cli, dlq, doctor, queue_command, run_batch, top
from pagestream.serve_settings import SET_BY_SERVE, ServeSettings
from shared.settings import build_parser

COMPLETIONS = Path(cli.__file__).parent / "completions"


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with every command as a subcommand; the program has one parser each, for a fast start."""
    root = argparse.ArgumentParser(prog="pagestream", description="LLM serving with paged KV memory.")
    commands = root.add_subparsers()
    for name, parents in _parsers():
        # `serve` has flags of the gateway and the worker: later parents win.
        command = commands.add_parser(
            name, parents=parents, add_help=False, conflict_handler="resolve", help=parents[-1].description or ""
        )
        for action in command._actions:  # argparse has no public list of them
            if action.metavar == "PATH":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif isinstance(action.metavar, str) and action.metavar.startswith("{"):  # settings check values themselves
                action.choices = action.metavar[1:-1].split(",")
    return root


def _parsers() -> Iterator[tuple[str, list[argparse.ArgumentParser]]]:
    passed_on = [build_parser(cls, "pagestream serve", SET_BY_SERVE) for cls in (WorkerSettings, GatewaySettings)]
    yield "serve", [*passed_on, build_parser(ServeSettings, "pagestream serve")]
    yield "gateway", [build_parser(GatewaySettings, "pagestream gateway")]
    yield "worker", [build_parser(WorkerSettings, "pagestream worker")]
    yield "batches", [build_parser(DriverSettings, "pagestream batches")]
    for name, module in {
        "chat": chat, "run-batch": run_batch, "estimate": estimate, "top": top, "dlq": dlq, "queue": queue_command,
        "doctor": doctor,
    }.items():  # fmt: skip
        yield name, [module.build_parser()]
    yield "new-key", [cli.new_key_parser()]
    yield "config", [cli.config_parser()]
    yield "completion", [cli.completion_parser()]


def completions() -> dict[str, str]:
    """Return shell -> script."""
    return {shell: shtab.complete(whole_parser(), shell) for shell in cli.SHELLS}


def main() -> None:
    COMPLETIONS.mkdir(exist_ok=True)
    for shell, script in completions().items():
        (COMPLETIONS / f"pagestream.{shell}").write_text(script.rstrip() + "\n")


if __name__ == "__main__":
    main()
