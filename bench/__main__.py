"""python -m bench: load a server (bench/load_generator.py); python -m bench engine: the engine alone, without HTTP."""

import sys


def main(argv: list[str]) -> int:
    if argv[:1] == ["engine"]:
        from bench.engine import main as engine_main  # noqa: PLC0415  imports torch; the load generator must not

        return int(engine_main(argv[1:]))
    from bench.load_generator import main as load_main  # noqa: PLC0415

    return load_main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
