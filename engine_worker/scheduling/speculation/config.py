"""The keys of `--speculative-config`, which are vLLM's (setting.py reads them)."""

import msgspec

from shared.settings import SettingsError

# On CUDA, attention reads the keys of four rows of a sequence at once: a token and three drafts. More drafts were not
# measured there.
MAX_DRAFTS = {"cpu": 7, "cuda": 3}

# Methods with a draft head: whether it has a directory of its own.
_HEADS = {"eagle3": True, "mtp": False}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are found, and how many are checked in a step."""

    method: str  # a key of PROPOSERS
    model: str = ""  # eagle3: directory of the head
    num_speculative_tokens: int = 3  # the most drafts of a sequence and step
    prompt_lookup_min: int = 2  # ngram, ngram_gpu: the fewest last tokens that must have occurred before
    prompt_lookup_max: int = 4  # ngram, ngram_gpu: the most that are compared; the longest match is continued
    suffix_decoding_max_tree_depth: int = 24  # suffix: the most last tokens that are compared
    min_gain: float = 1.05  # drafts pause where tokens per second, measured, grow by less; 0: never

    def __post_init__(self) -> None:
        needs_model = _HEADS.get(self.method, False)
        if bool(self.model) is not needs_model:
            needs = "needs the directory of its head" if needs_model else "has no model of its own"
            raise ValueError(f"model: method {self.method} {needs}; got {self.model!r}")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS["cpu"]:
            raise ValueError(
                f"num_speculative_tokens: expected 1 to {MAX_DRAFTS['cpu']}; got {self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min: expected at least 1 and at most prompt_lookup_max "
                f"({self.prompt_lookup_max}); got {self.prompt_lookup_min}"
            )
        if self.suffix_decoding_max_tree_depth < 1:
            raise ValueError(
                f"suffix_decoding_max_tree_depth: expected at least 1; got {self.suffix_decoding_max_tree_depth}"
            )
        if self.min_gain < 0.0:
            raise ValueError(f"min_gain: expected 0 or more; got {self.min_gain}")

    @property
    def has_head(self) -> bool:
        """Whether the worker loads a draft head."""
        return self.method in _HEADS

    @property
    def searches_on_device(self) -> bool:
        """Whether the device keeps the tokens of sequences, and searches them."""
        return self.method == "ngram_gpu"

    @property
    def lookahead(self) -> int:
        """Tokens after those of a step that making its drafts computes: a head runs on its own drafts."""
        return self.num_speculative_tokens - 1 if self.has_head else 0

    def check_place(self, device: str) -> None:
        """Raise SettingsError if a device (`cpu` or `cuda`) cannot make or check the drafts."""
        if self.searches_on_device and device == "cpu":
            raise SettingsError("--speculative-config: method: ngram_gpu needs --device cuda; use ngram")
        most = MAX_DRAFTS[device]
        if self.num_speculative_tokens > most:
            raise SettingsError(
                f"--speculative-config: num_speculative_tokens: expected 1 to {most} on {device}; "
                f"got {self.num_speculative_tokens}"
            )
