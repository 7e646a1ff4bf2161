"""A gated short convolution (LFM2): out(gate * conv(factor * value)), one filter per channel.

Its state is the last `width - 1` inputs of the filters. They are kept per token in the KV pool, like keys and values
with a window of `width` tokens. So hits, forks, swaps and takeovers need nothing of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import Part, Role, TensorSpec, linear_tensors


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """The short convolution of one layer.

    Attributes:
        channels: Channels of the filters; the hidden size.
        width: Inputs of a filter: the token and those before it.
        bias: The filters and both linear layers have biases.
    """

    channels: int
    width: int
    bias: bool = False

    @property
    def window(self) -> int:
        """Tokens visible to a token, including itself."""
        return self.width

    def num_cache_layers(self, values_per_token: int) -> int:
        """Return the layers of the KV pool that hold a token's inputs; each holds `values_per_token`."""
        return -(-self.channels // values_per_token)

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        yield TensorSpec(f"{names.conv}.weight", (self.channels, 1, self.width))
        if self.bias:
            yield TensorSpec(f"{names.conv}.bias", (self.channels,))
        yield from linear_tensors(Role.QKV, (names.conv_in,), (self.channels,) * 3, hidden, bias=self.bias)
        yield from linear_tensors(Role.OUT, (names.conv_out,), (hidden,), self.channels, bias=self.bias)

    def share(self, rank: int, size: int) -> Self:
        """Return itself: one rank has all channels."""
        return self

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield nothing: one rank has all channels."""
        yield from ()

    def fits(self, size: int) -> bool:
        """Return whether there is one rank."""
        return size == 1

    @property
    def sizes(self) -> str:
        return "short convolutions, which ranks cannot share"
