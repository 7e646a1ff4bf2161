"""Split a causal model of transformers into its decoder and everything that makes logits of the decoder's output.

The head is the model itself with the decoder replaced by a module that returns the given hidden states, so its scales
and caps are the library's own.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Output:
    """A decoder's output with only the last hidden state, by name or as the first item of a tuple."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Computed(nn.Module):
    """Replaces the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *arguments: Any, **options: Any) -> _Output:
        assert self.hidden is not None
        return _Output(self.hidden)


def split_head(model: "PreTrainedModel") -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return the decoder and the head.

    decoder(input_ids, position_ids, use_cache=False).last_hidden_state is [1, T, H]; head(hidden [1, N, H]) returns
    logits
    [1, N, vocab_size].

    Raises:
        ValueError: If the decoder cannot be separated.
    """
    decoder = model.get_decoder()
    paths = [path for path, module in model.named_modules() if module is decoder and path]
    if not paths:
        raise ValueError(f"{type(model).__name__} has no separate decoder")
    computed = _Computed()
    rest = _with_module(model, paths[0].split("."), computed)

    def head(hidden: Tensor) -> Tensor:
        computed.hidden = hidden
        token_ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            logits: Tensor = rest(input_ids=token_ids, use_cache=False).logits
        finally:
            computed.hidden = None
        return logits

    return decoder, head


def _with_module(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """Return a shallow copy of `module` with `replacement` at `path`."""
    copied = copy.copy(module)
    name, *below = path
    inner = _with_module(module._modules[name], below, replacement) if below else replacement
    object.__setattr__(copied, "_modules", {**module._modules, name: inner})
    return copied
