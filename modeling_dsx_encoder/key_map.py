"""Declarative maps between the weights of two encoders, exact in both directions.

A map names modules or single parameters: `{stock name: our name}`.

- `{}` stands for the number of a layer
- `None` drops the stock weights on purpose
- `name[0]`, `name[1]`, ... on either side is part 0, 1, ... of one tensor along its first axis: of a `qkv_proj`
  queries, keys and values, of anything else equal parts
- several stock names with one name of ours are copies: the first of the map counts, all are filled on the way back

    {"layer.{}.attention.query": "layers.{}.attention.qkv_proj[0]", "layer.{}.pooler": None, ...}

`KeyMap.to_ours` and `KeyMap.to_stock` move tensors and never compute with them, so that there and back is bit-equal.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

PART = re.compile(r"(.+)\[(\d+)\]")


class Place(NamedTuple):
    """A tensor, or part `part` of `num_parts` of it along its first axis."""

    key: str
    part: int | None = None
    num_parts: int = 1

    def __str__(self):
        return self.key if self.part is None else f"{self.key}[{self.part}]"


class Route(NamedTuple):
    """What goes where: `ours` is None for weights that are dropped. `rank` is the route's line in the map."""

    rank: int
    stock: Place
    ours: Place | None


@dataclass
class Moved:
    """What became of the keys of a state dict.

    Args:
        state: The moved tensors by their new names.
        dropped: Keys without a place on the other side, by the map's own word.
        differing: Copies that are not equal to the one that counts; their values are lost.
    """

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


def parse_names(names: list[str | None]) -> list[Place | None]:
    """Names of a map as places: `"a.b[1]"` is part 1 of `a.b`."""
    places = []
    for name in names:
        match = PART.fullmatch(name or "")
        places.append(Place(match[1], int(match[2])) if match else name and Place(name))
    num_parts = {}
    for place in places:
        if place is not None and place.part is not None:
            num_parts[place.key] = max(num_parts.get(place.key, 1), place.part + 1)
    return [place and place._replace(num_parts=num_parts.get(place.key, 1)) for place in places]


class KeyMap:
    """A map of names made ready for one configuration.

    Args:
        keys: `{stock name: our name | None}`, see the module.
        qkv_sizes: Rows of queries, keys and values in our `qkv_proj`: (H D, K D, K D).
    """

    def __init__(self, keys: dict[str, str | None], qkv_sizes: tuple[int, int, int]):
        self.qkv_sizes = qkv_sizes
        self.entries = []
        places = zip(parse_names(list(keys)), parse_names(list(keys.values())), strict=True)
        for rank, (stock, ours) in enumerate(places):
            pattern = re.escape(stock.key).replace(re.escape("{}"), r"(\d+)")
            # The parameter itself, or one of the module of this name.
            self.entries.append((re.compile(rf"{pattern}(?P<leaf>\.\w+)?"), Route(rank, stock, ours)))

    def routes(self, stock_key: str) -> list[Route]:
        """Where a stock tensor, or each part of it, goes; [] for a key that the map does not know."""
        found = []
        for pattern, route in self.entries:
            match = pattern.fullmatch(stock_key)
            if match is None:
                continue
            leaf = match["leaf"] or ""
            ours = route.ours
            if ours is not None:
                numbers = match.groups()[: pattern.groups - 1]
                ours = ours._replace(key=ours.key.format(*numbers) + leaf)
            found.append((leaf, Route(route.rank, route.stock._replace(key=stock_key), ours)))
        # "decoder.bias" goes before "decoder", whose bias it is.
        shortest = min((leaf for leaf, _ in found), key=len, default="")
        return [route for leaf, route in found if leaf == shortest]

    def sizes(self, place: Place, num_rows: int) -> list[int]:
        """Rows of each part of a tensor.

        Raises:
            ValueError: The rows do not divide.
        """
        if "qkv_proj" in place.key and place.num_parts == 3:
            return list(self.qkv_sizes)
        if num_rows % place.num_parts:
            raise ValueError(f"{place.key} has {num_rows} rows, which are no {place.num_parts} equal parts.")
        return [num_rows // place.num_parts] * place.num_parts

    def cut(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """The part of a tensor that stands at `place`."""
        if place.part is None:
            return tensor
        start = sum(self.sizes(place, len(tensor))[: place.part])
        return tensor[start : start + self.sizes(place, len(tensor))[place.part]]

    def check_piece(self, piece: torch.Tensor, source: Place, target: Place, shape: tuple[int, ...]) -> None:
        """Refuse a piece that does not fit its place in a tensor of this shape.

        Raises:
            ValueError: Naming both keys and both shapes.
        """
        wanted = tuple(shape)
        if target.part is not None:
            wanted = (self.sizes(target, shape[0])[target.part], *wanted[1:])
        if tuple(piece.shape) != wanted:
            raise ValueError(
                f"{source} has shape {tuple(piece.shape)}, but {target} takes {wanted}: the weights and the "
                "configuration do not belong together."
            )

    def to_ours(self, state: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> Moved:
        """Stock weights under our names.

        Args:
            state: The stock model's `state_dict()`.
            shapes: Names and shapes that our model has.

        Raises:
            ValueError: A key that one of the two sides does not know, or a shape that does not fit.
        """
        moved, pieces = Moved(), defaultdict(dict)
        refuse_unknown([key for key in state if not self.routes(key)], "the stock model", "the key map")
        for route in sorted((route for key in state for route in self.routes(key)), key=lambda route: route.rank):
            stock, ours = route.stock, route.ours
            if ours is None:
                moved.dropped.append(str(stock))
                continue
            refuse_unknown([f"{stock} -> {ours}"] if ours.key not in shapes else [], "the stock model", "ours")
            piece = self.cut(state[stock.key], stock)
            self.check_piece(piece, stock, ours, shapes[ours.key])
            counted = pieces[ours.key].setdefault(ours.part or 0, piece)
            if not torch.equal(counted, piece):
                moved.differing.append(str(stock))
        for key, shape in shapes.items():
            refuse_unknown([key] if key not in pieces else [], "our model", "the stock one")
            moved.state[key] = joined(pieces[key])
            self.check_piece(moved.state[key], Place(f"what the stock model has for {key}"), Place(key), shape)
        return moved

    def to_stock(self, state: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> Moved:
        """Our weights under the stock names; arguments and errors as above, the other way round.

        `dropped` then names the stock keys that nothing of ours fills.
        """
        moved, used = Moved(), set()
        for key, shape in shapes.items():
            routes = [route for route in self.routes(key) if route.ours is not None]
            if not routes:
                refuse_unknown([] if self.routes(key) else [key], "the stock model", "the key map")
                moved.dropped.append(key)
                continue
            missing = [f"{key} <- {route.ours}" for route in routes if route.ours.key not in state]
            refuse_unknown(missing, "the stock model", "ours")
            pieces = {route.stock.part or 0: self.cut(state[route.ours.key], route.ours) for route in routes}
            for route in routes:
                self.check_piece(pieces[route.stock.part or 0], route.ours, route.stock, shape)
            moved.state[key] = joined(pieces)
            used.update(route.ours.key for route in routes)
        refuse_unknown([key for key in state if key not in used], "our model", "the stock one")
        return moved


def joined(pieces: dict[int, torch.Tensor]) -> torch.Tensor:
    """Parts 0, 1, ... along their first axis, a tensor of its own."""
    return torch.cat([piece for _, piece in sorted(pieces.items())])


def refuse_unknown(keys: list[str], owner: str, other: str) -> None:
    """Refuse weights without a place on the other side.

    Raises:
        ValueError: Naming the keys.
    """
    if keys:
        shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        raise ValueError(f"{owner} has weights for which {other} has no place: {shown}.")
