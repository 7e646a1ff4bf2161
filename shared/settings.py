"""Settings: flags, environment, and a TOML file become one frozen dataclass. Each value has a known origin.

Precedence: flag > environment > file > default. Field `max_model_len` is the flag `--max-model-len`, the variable
`PAGESTREAM_MAX_MODEL_LEN` (empty counts as unset), and the key `max_model_len` in the file of `--config` or
`PAGESTREAM_CONFIG`. Top-level keys of the file apply to every program; a table with the last word of the program's name
(`[gateway]`, `[worker]`) applies to that program and has precedence. A wrong value stops the start with its name.

    @dataclass(frozen=True, kw_only=True)
    class WorkerSettings:
        block_size: int = setting(16, help="size of a KV block, in tokens", choices=(8, 16, 32, 64))

    loaded = load_settings(WorkerSettings, sys.argv[1:], os.environ, prog="pagestream worker")
    loaded.settings.block_size, loaded.origins["block_size"]      # 16, "default"

A field without setting() is a part: a settings class whose options belong to the program too.
"""

import argparse
import dataclasses
import difflib
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

ENVIRONMENT_PREFIX = "PAGESTREAM_"
# Variables that Kubernetes and Docker set for each service that they know. A service that is named
# pagestream-gateway gives PAGESTREAM_GATEWAY_PORT=tcp://10.0.0.9:8000.
_LINK_NAME = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?")
_PASSWORD = re.compile(r"(://[^/@:]*:)[^/]*@")  # in a URL
_UNITS = {name.lower(): name for name in ("SECONDS", "BYTES", "RATIO", "PORT", "URL", "HOST", "KEY")}
_UNITS |= {"hosts": "HOST", "endpoint": "URL"}
_TYPES: Mapping[Any, str] = {int: "N", float: "N", Path: "PATH", str: "NAME"}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class SettingsError(ValueError):
    """A setting is invalid; the message names the flag, variable, or file key."""


class _SettingsClass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


_Settings = TypeVar("_Settings", bound=_SettingsClass)


@dataclass(frozen=True)
class Loaded(Generic[_Settings]):
    settings: _Settings
    origins: dict[str, str]  # field -> "flag" | "env PAGESTREAM_X" | "file PATH" | "default"
    config_path: Path | None = None


def setting(
    default: Any = MISSING,
    *,
    help: str,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[Any] | None = None,
    aliases: Sequence[str] = (),
    secret: bool = False,
    metavar: str = "",
) -> Any:
    """Return a dataclass field for an option. Without a default it is required.

    Args:
        default: The default value; must be immutable.
        help: One phrase: what the option sets, its unit, and a computed default.
        parse: Converts text to the value; by default chosen by the field's type.
        choices: Allowed values.
        aliases: Additional flags.
        secret: Whether to hide the value in --show-config.
        metavar: Type of the value in --help, if its name and annotation do not show it.
    """
    metadata = {"help": help, "parse": parse, "choices": choices, "aliases": tuple(aliases), "secret": secret}
    metadata["metavar"] = metavar
    if isinstance(default, list | dict | set):
        raise TypeError(f"default of a setting: expected an immutable value, got {default!r}")
    return dataclasses.field(default=default, metadata=metadata)


def options(cls: type[_SettingsClass]) -> tuple[Field[Any], ...]:
    """Return the options of a settings class and of its parts, in the order of their fields.

    Raises:
        TypeError: If a name occurs twice.
    """
    found = [option for field in fields(cls) for option in ([field] if _is_option(field) else options(_part(field)))]
    names = [option.name for option in found]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"{cls.__name__} has {', '.join(duplicates)} twice")
    return tuple(found)


def _is_option(field: Field[Any]) -> bool:
    return "help" in field.metadata


def _part(field: Field[Any]) -> type[_SettingsClass]:
    assert isinstance(field.type, type) and dataclasses.is_dataclass(field.type), f"{field.name} is not a setting()"
    return field.type


def parse_count(text: str) -> int:
    """Parse a number with a suffix as vLLM does: `16k` is 16,000 and `16K` is 16,384."""
    return _parse_quantity(text, binary_suffix=False)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: `4G` and `4GiB` are 4 * 2**30, `4g` and `4GB` are 4 * 10**9."""
    return _parse_quantity(text, binary_suffix=True)


def load_settings(
    cls: type[_Settings],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str = "pagestream",
    tables: Sequence[str] = (),
    unknown: list[str] | None = None,
) -> Loaded[_Settings]:
    """Load the settings of a program. `--show-config [text|json]` prints every value with its origin and exits.

    Args:
        cls: A settings class.
        argv: Command-line arguments.
        environ: Environment variables.
        prog: Name of the program; its last word names its table of the file.
        tables: Further tables of the file that apply; its own has precedence.
        unknown: Receives unknown arguments, for another program; without it they are an error.

    Raises:
        SettingsError: If a value is invalid or missing.
    """
    namespace, rest = build_parser(cls, prog).parse_known_args(argv)
    if rest and unknown is None:
        names = [_flag(field) for field in options(cls)]
        raise SettingsError(f"unknown option {' '.join(rest)}; {suggestion(rest[0], names) or 'see --help'}")
    if unknown is not None:
        unknown.extend(rest)
    given = vars(namespace)
    config_name = given.pop("config", None) or environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    config_path = Path(config_name) if config_name else None
    tables = (*tables, prog.rsplit(maxsplit=1)[-1])
    file_values = _read_file(cls, config_path, tables) if config_path else {}
    show = given.pop("show_config", None)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in options(cls):
        variable = ENVIRONMENT_PREFIX + field.name.upper()
        if field.name in given:
            text, source, origin = given[field.name], _flag(field), "flag"
        elif environ.get(variable) and not is_service_link(variable, environ[variable]):
            text, source, origin = environ[variable], variable, f"env {variable}"
        elif field.name in file_values:
            text, source, origin = file_values[field.name], f"{field.name} in {config_path}", f"file {config_path}"
        else:
            values[field.name], origins[field.name] = field.default, "default"
            continue
        values[field.name], origins[field.name] = _parse(field, text, source), origin

    if show:
        sys.stdout.write(_describe(cls, values, origins, show))
        raise SystemExit(0)
    missing = [_flag(field) for field in options(cls) if values[field.name] is MISSING]
    if missing:
        raise SettingsError(f"{', '.join(missing)}: a value is required")
    return Loaded(_construct(cls, values), origins, config_path)


def is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes or Docker, and not a user, set an environment variable."""
    return bool(_LINK_NAME.fullmatch(name) or _LINK_VALUE.fullmatch(value))


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a clause that names the known option most like an unknown one, or an empty string."""
    close = closest(word.partition("=")[0], known)
    return f"did you mean {close}?" if close else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word most like an unknown one, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return close[0] if close else ""


def settings_or_exit(
    cls: type[_Settings],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    tables: Sequence[str] = (),
    unknown: list[str] | None = None,
) -> Loaded[_Settings]:
    """Load settings for a `main`. A SettingsError becomes one line on stderr and exit status 2."""
    try:
        return load_settings(cls, argv, environ, prog=prog, tables=tables, unknown=unknown)
    except SettingsError as error:
        sys.stderr.write(f"{prog}: error: {error}\n")
        raise SystemExit(2) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def build_parser(
    cls: type[_SettingsClass], prog: str, without: Container[str] = frozenset()
) -> argparse.ArgumentParser:
    """Return a parser of the flags. Values stay text, because values of all sources are parsed by the same code.

    Args:
        cls: A settings class.
        prog: Name of the program.
        without: Flags to leave out.
    """
    # No abbreviations: `--block` would change its meaning when a second option with this prefix is added.
    parser = _Parser(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in options(cls):
        if _flag(field) in without:
            continue
        names = [_flag(field), *field.metadata["aliases"]]
        help_text = (field.metadata["help"] + _default_note(field)).replace("%", "%%")
        if _value_type(field) is bool:
            parser.add_argument(*names, dest=field.name, action=argparse.BooleanOptionalAction, help=help_text)
        else:
            choices = field.metadata["choices"]
            metavar = "{" + ",".join(map(str, choices)) + "}" if choices else _metavar(field)
            nargs = "+" if _is_list(_value_type(field)) else None
            parser.add_argument(*names, dest=field.name, metavar=metavar, help=help_text, nargs=nargs)
    parser.add_argument("--config", metavar="PATH", help="TOML file with further settings")
    show_help = "print each value and its origin, then exit"
    parser.add_argument("--show-config", nargs="?", const="text", choices=("text", "json"), help=show_help)
    return parser


def _flag(field: Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _metavar(field: Field[Any]) -> str:
    """Return the type of the value, by a unit in the name or by the annotation."""
    units = (_UNITS[word] for word in field.name.split("_") if word in _UNITS)
    kind = _value_type(field)
    return field.metadata["metavar"] or next(units, _TYPES[typing.get_args(kind)[0] if _is_list(kind) else kind])


def _default_note(field: Field[Any]) -> str:
    if field.default in (MISSING, None, "", ()):
        return ""
    return f" (default: {_display(field, field.default)})"


def _value_type(field: Field[Any]) -> Any:
    """Return the annotation without `| None`."""
    hint: Any = field.type
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _parse(field: Field[Any], text: Any, source: str) -> Any:
    kind = _value_type(field)
    parse = field.metadata["parse"] or _parser_of(kind)
    try:
        value = parse(_as_text(text))
    except (ValueError, ArithmeticError) as error:
        raise SettingsError(f"{source}: {error}") from error
    choices = field.metadata["choices"]
    if choices is not None and value not in choices:
        raise SettingsError(f"{source}: expected one of {', '.join(map(str, choices))}; got {value}")
    return value


def _is_list(kind: Any) -> bool:
    """Return whether the value is a list, separated by commas, or by spaces in a flag."""
    return typing.get_origin(kind) is tuple


def _parser_of(kind: Any) -> Callable[[str], Any]:
    if _is_list(kind):
        item = _parser_of(typing.get_args(kind)[0])
        return lambda text: tuple(item(part.strip()) for part in text.split(",") if part.strip())
    return _PARSERS[kind]


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_as_text(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _parse_bool(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"expected true or false, got {text!r}")
    return known[text.lower()]


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number, got {text!r}") from None


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None


_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    Path: Path,
    str: str,
}


def _parse_quantity(text: str, *, binary_suffix: bool) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or (match[3] and not binary_suffix):
        examples = "4G or 512MiB" if binary_suffix else "16k or 16K"
        raise ValueError(f"expected a number such as 4096, {examples}; got {text!r}")
    number, suffix, unit = match[1], match[2], (match[3] or "")
    if unit.lower() == "b":
        base = 1000
    elif unit:
        base = 1024
    else:
        base = 1024 if suffix.isupper() else 1000
    scale: int = base ** _POWERS[suffix.lower()]
    return round(float(number) * scale)


def _read_file(cls: type[_SettingsClass], path: Path, tables: Sequence[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # tomllib's and UTF-8's errors are ValueErrors
        raise SettingsError(f"--config {path}: {error}") from error
    common = {key: value for key, value in content.items() if not isinstance(value, dict)}
    given = [common, *(content.get(table, {}) for table in tables)]
    values = {key.replace("-", "_"): value for part in given for key, value in part.items()}
    unknown = sorted(values.keys() - {field.name for field in options(cls)})
    if unknown:
        raise SettingsError(
            f"--config {path}: {tables[-1]} has no setting {', '.join(unknown)}; "
            "put settings of one program into the table with its name"
        )
    return values


def _construct(cls: type[_Settings], values: dict[str, Any]) -> _Settings:
    try:
        return cls(**{f.name: values[f.name] if _is_option(f) else _construct(_part(f), values) for f in fields(cls)})
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _display(field: Field[Any], value: Any) -> str:
    if value is MISSING:
        return "(required)"
    if field.metadata["secret"] and value:
        return "***"
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return _PASSWORD.sub(r"\1***@", shown)


def _describe(cls: type[_SettingsClass], values: dict[str, Any], origins: dict[str, str], form: str) -> str:
    shown = {
        field.name: {"value": _display(field, values[field.name]), "origin": origins[field.name]}
        for field in options(cls)
    }
    if form == "json":
        return json.dumps(shown, indent=2) + "\n"
    name_width = max((len(name) for name in shown), default=0)
    value_width = max((len(entry["value"]) for entry in shown.values()), default=0)
    lines = (f"{name:{name_width}}  {entry['value']:{value_width}}  {entry['origin']}" for name, entry in shown.items())
    return "\n".join(line.rstrip() for line in lines) + "\n"
