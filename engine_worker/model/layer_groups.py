"""Which group of the KV pool each layer belongs to, and the windows of each group."""

from collections.abc import Sequence
from typing import Protocol

from engine_worker.kv.layout import Place


class Windowed(Protocol):
    @property
    def window(self) -> int: ...


class LayerGroups:
    """`places` has the group and the place of each layer, `windows` the distinct windows of each group's layers."""

    def __init__(self, attentions: Sequence[Windowed], places: Sequence[Place] = ()) -> None:
        """Group the layers; without `places` they form one group, in their order."""
        self.places = tuple(places) or tuple((0, layer) for layer in range(len(attentions)))
        found: dict[int, set[int]] = {}
        for (group, _), attention in zip(self.places, attentions, strict=True):
            found.setdefault(group, set()).add(attention.window)
        self.windows = [sorted(found[group]) for group in range(len(found))]
