"""False claims of a page: each function takes a page's text and returns the claims that the code contradicts.

A claim is a name in `backticks` or in a code block: a route, a flag, a file. Names under a heading with "Not there"
must not exist; the first two functions check them.
"""

import re
from collections.abc import Callable, Iterable

from engine_worker.model.architectures import MODULES
from tests.docs import facts

NOT_THERE = re.compile(r"(?ms)^## Not there.*?(?=^## |\Z)")
_FENCE = re.compile(r"(?ms)^```.*?^```")
_SPAN = re.compile(r"`([^`]+)`")
_ROUTE = re.compile(r"(?:(GET|POST|PUT|PATCH|DELETE|HEAD) )?(/[a-z][\w/{}.:-]*)(?:\?.*)?")
_FLAGS_OF_OTHERS = {"--find-links", "--require-hashes", "--profile"}
# Paths on a machine, in a container or in a secret, not routes.
_MACHINE_PATHS = ("/models", "/opt", "/var", "/tmp", "/etc", "/usr", "/run", "/dev", "/path", "/data", "/proc")
_PATHS_OF_OTHERS = {"/api/chat", "/api/embed"}
_ENDINGS = "py|md|lua|toml|yml|yaml|json|jsonl|txt|sh|acl|png|js|html|css|in|pdf"


def spans(text: str) -> list[str]:
    """Return the texts in backticks outside code blocks; a span may continue on the next line."""
    return [" ".join(span.split()) for span in _SPAN.findall(_FENCE.sub("", text))]


def blocks(text: str) -> list[str]:
    """Return the lines of code blocks; lines continued by a backslash are joined."""
    return [line for block in _FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()[1:-1]]


def named_routes(text: str) -> Iterable[tuple[str, str]]:
    """Yield (method or "", path), with `{}` for names in capitals or braces."""
    for span in spans(text):
        match = _ROUTE.fullmatch(span)
        if match and (match[2] in ("/models", "/opt") or not match[2].startswith(_MACHINE_PATHS)):
            path = re.sub(r"\{[^}]*\}|(?<=/)[A-Z_]+(?=/|$)", "{}", match[2])
            if not re.search(rf"\.({_ENDINGS})$", path) or path in facts.routes():
                yield match[1] or "", path


def false_routes(text: str) -> list[str]:
    routes = facts.routes()
    return [
        f"{method} {path}".strip()
        for method, path in named_routes(NOT_THERE.sub("", text))
        if path not in _PATHS_OF_OTHERS and (path not in routes or (method and method not in routes[path]))
    ]


def routes_that_are_there(text: str) -> list[str]:
    """Return routes in the second column of a table under "Not there" that are served."""
    cells = [
        line.split("|")[2] for part in NOT_THERE.findall(text) for line in part.splitlines() if line.count("|") > 3
    ]
    named = [re.sub(r"`[^`]+` with ", "", cell) for cell in cells]  # a served route without one of its fields
    return [
        f"{method} {path}".strip()
        for cell in named
        for method, path in named_routes(cell)
        if path in facts.routes() and (not method or method in facts.routes()[path])
    ]


def false_statuses(text: str) -> list[str]:
    """Check "`/path` answers NNN" and "NNN `code`"."""
    found = []
    for path, status in re.findall(r"[-.;:] `(?:[A-Z]+ )?(/[\w/]+)` (?:answers|gives|is) (\d{3})\b", text):
        statuses = set[int]().union(*facts.routes().get(path, {}).values())
        found += [] if int(status) in statuses else [f"{path} {status}"]
    codes = facts.error_codes()
    for status, code in re.findall(r"\b([45]\d\d) `([a-z]+_\w+|draining|starting)`", text):
        found += [] if code in codes.get(int(status), ()) else [f"{status} {code}"]
    return found


def false_scripts(text: str) -> list[str]:
    named = {name.lower() for name in re.findall(r"\*\*([A-Z]{3,})\*\*", text)} | set(
        re.findall(r"\b(\w+)\.lua\b", text)
    )
    return sorted(named - facts.scripts())


def false_store_names(text: str) -> list[str]:
    """Check store names such as `{m}:x:<id>`."""
    named = {re.sub(r"<[^>]+>", "*", name) for name in re.findall(r"\{m\}:(?:[\w:-]|<[^>]+>)+", text)}
    return sorted(named - facts.redis_names())


def false_commands(text: str) -> list[str]:
    """Check `pagestream X`, `make X` and `python -m X`."""
    found = []
    for line in [*spans(text), *blocks(text)]:
        for name in re.findall(r"(?:^|[\s/])pagestream (?!from\b)([a-z][\w-]*)", line.partition(" #")[0]):
            found += [] if name in facts.commands() else [f"pagestream {name}"]
        for name in re.findall(r"^make ([a-z][\w-]*)", line):
            found += [] if name in facts.make_targets() else [f"make {name}"]
        for name, rest in re.findall(
            r"python3? (?:-P )?-m ((?:bench|tests|engine_worker|gateway|pagestream)[\w.]*)(.*)", line
        ):
            path = name.replace(".", "/")
            found += [] if {f"{path}.py", f"{path}/__main__.py"} & facts.files() else [f"python -m {name}"]
            if name == "bench" and (program := re.match(r" ([a-z][\w-]+)", rest)):
                found += [] if program[1] in facts.benchmarks() else [f"bench {program[1]}"]
    return found


def false_flags(text: str) -> list[str]:
    """Return flags that no program has, alone in backticks or in one of our commands."""
    ours = [
        line for line in [*spans(text), *blocks(text)] if re.match(r"--\w|pagestream |(?:\S+/)?python3? -m bench", line)
    ]
    named = {
        flag for line in ours for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", re.sub(r"['\"].*['\"]", "", line))
    }
    return sorted(named - facts.flags() - _FLAGS_OF_OTHERS)


def false_files(text: str) -> list[str]:
    """Check `a/b.py`, `b.py` and `folder/`, from the root or as the end of a path, and the test in `x.py::test`."""
    found = []
    for span in spans(text):
        path, _, test = span.partition("::")
        is_folder = path.endswith("/") and path.split("/")[0] in facts.files()
        is_file = re.fullmatch(rf"[\w.-]+(/[\w.-]+)+\.({_ENDINGS})|[\w.-]+\.(py|md|lua)", path)
        if not is_file and not is_folder:
            continue
        path = path.rstrip("/")
        named = [facts.ROOT / name for name in facts.files() if f"/{name}".endswith(f"/{path}")]
        if not named or (test and not any(f"def {test}(" in file.read_text() for file in named)):
            found.append(span)
    return found


def false_layout(text: str) -> list[str]:
    """Check the tree under "## Layout": roots at the margin, their content indented."""
    trees = re.findall(r"(?ms)^## Layout.*?^```\n(.*?)^```", text)
    found, root = [], ""
    for line in "".join(trees).splitlines():
        names = re.match(r"( *)((?:[\w*/.]+(?:\.py|\.lua|/)(?: |$))+)", line)
        if names is None:
            continue
        root = root if names[1] else names[2].split()[0]
        for name in names[2].split():
            path = f"{root if names[1] else ''}{name}"
            found += [] if list(facts.ROOT.glob(path)) else [path]
    return found


def false_metrics(text: str) -> list[str]:
    bases = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in re.findall(r"\bpagestream_\w*[a-z]\b", text)}
    known = facts.metrics() | {name.removesuffix("_total") for name in facts.metrics()}
    return sorted(name for name in bases - known if not name.endswith("_"))


def false_decisions(text: str) -> list[str]:
    """ADR 93, ADR 0093, ADRs 0005, 0012 and 0020."""
    lists = re.findall(r"\bADRs?\s+(\d{1,4}(?:(?:,\s+|\s+and\s+|\s+to\s+)\d{1,4})*)\b", text)
    named = {int(number) for listed in lists for number in re.findall(r"\d+", listed)}
    return [f"ADR {number}" for number in sorted(named - facts.decisions().keys())]


# Public name of each family and its `model_type`.
FAMILY_NAMES = {
    "Ernie 4.5": "ernie4_5", "Gemma 2": "gemma2", "Gemma 3": "gemma3_text", "GLM-4": "glm4", "Granite 3": "granite",
    "Granite SWA": "granite_swa",
    "Helium": "helium", "LFM2": "lfm2", "LFM2-MoE": "lfm2_moe",
    "Llama": "llama", "Ministral": "ministral", "Ministral 3": "ministral3",
    "Mistral": "mistral", "OLMo 2": "olmo2",
    "OLMo 3": "olmo3", "Phi-3": "phi3", "Phi-4": "phi3", "Qwen2": "qwen2", "Qwen2.5": "qwen2", "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe", "Qwen3-Next": "qwen3_next", "Qwen3.5": "qwen3_5_text", "Qwen3.5-MoE": "qwen3_5_moe_text",
    "Mixtral": "mixtral", "OLMoE": "olmoe", "Granite MoE": "granitemoe", "Granite 4": "granitemoehybrid",
    "Nemotron-H, Nemotron 3 Nano": "nemotron_h",
    "GLM-4.5": "glm4_moe", "gpt-oss": "gpt_oss", "Seed-OSS": "seed_oss", "SmolLM2": "llama", "SmolLM3": "smollm3",
}  # fmt: skip


def false_families(text: str) -> list[str]:
    """Return families in the table under "## Models" that are refused, and missing ones."""
    section = re.search(r"(?ms)^## Models$(.*?)(?=^## |\Z)", text)
    rows = re.findall(r"(?m)^\| ([^|]*)\|[^|]*\| ([^|]*)\|[^|]*\|$", section[1]) if section else []
    named = {name.strip() for row in rows for name in row} - {"", "family"}
    unknown = {name for name in named if FAMILY_NAMES.get(name) not in MODULES}
    lacking = {name for name, kind in FAMILY_NAMES.items() if kind in MODULES} - named if rows else set()
    return sorted(unknown) + sorted(f"not named: {name}" for name in lacking)


CHECKS: list[Callable[[str], list[str]]] = [
    false_routes, routes_that_are_there, false_statuses, false_scripts, false_store_names, false_commands, false_flags,
    false_files, false_layout, false_metrics, false_decisions, false_families,
]  # fmt: skip
