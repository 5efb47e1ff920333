"""Filling in templates: what each field stands for, drawn to suit the tensor at hand."""

from __future__ import annotations

import torch

from . import ops
from .draft import Draft, is_float

__all__ = ["Slots"]


class Slots(dict):
    """What the fields of a template stand for, worked out as they are asked for."""

    def __init__(self, draw: Draft, x: str, **given: str) -> None:
        super().__init__(x=x, **given)
        self.draw = draw
        self.value = draw.values[x]

    def __missing__(self, key: str) -> str:
        filled = self[key] = str(self._fill(key))
        return filled

    def _fill(self, key: str) -> object:
        draw, shape = self.draw, self.value.shape
        choose = draw.random
        if key.startswith("P("):
            sizes = {"n": shape[-1:], "m": shape[-2:-1], "c": shape[-3:-2]}
            sizes = {name: size[0] for name, size in sizes.items() if size}
            return draw.parameter(eval(f"({key[2:-1]},)", {}, sizes), self.value.dtype)
        if key == "d":
            return choose.randrange(len(shape))
        if key in ("i", "part", "index", "D"):
            size = shape[int(self["d"])]
            if key == "index":
                return f"torch.tensor({[choose.randrange(size) for _ in range(choose.randint(1, 3))]})"
            return {"i": choose.randrange(size), "part": max(1, size - 1), "D": size}[key]
        if key in ("i_first", "i_last"):
            return choose.randrange(shape[0 if key == "i_first" else -1])
        if key == "part_last":
            return max(1, shape[-1] - 1)
        if key == "index_last":
            return [choose.randrange(shape[-1]) for _ in range(2)]
        if key in ("n", "m"):
            return shape[-1 if key == "n" else -2]
        if key == "rank":
            return len(shape)
        if key == "k":
            return choose.choice([0.25, 0.5, 0.8, 1.2, 1.5, -0.7])
        if key == "seed":
            return choose.randrange(100)
        if key == "g":
            return draw.generator()
        if key == "source":
            return draw.random.choice(draw.tracked) if draw.tracked else "no_such_source"
        if key == "y":
            return draw.pick(lambda v: is_float(v) and v.shape == shape) or self["x"]
        if key == "b":
            return draw.pick(lambda v: is_float(v) and v.dim() <= len(shape) and _broadcasts(v.shape, shape)) or self["x"]
        if key == "steps":
            steps = [self._step() for _ in range(choose.randint(2, 5))]
            self["segments"] = str(choose.randint(1, len(steps)))
            return ", ".join(steps)
        if key == "step":
            return self._step()
        if key == "chunks":
            return choose.randint(1, 5)
        if key in ("times", "slots"):
            return choose.randint(2, 7) if key == "times" else choose.randint(2, 4)
        if key == "module":
            return choose.choice(draw.set_up_names("m") or ["no_such_module"])
        if key == "leaf":
            leaves = [name for name in draw.set_up_names("v") if draw.values[name].requires_grad]
            return choose.choice(leaves or ["no_such_leaf"])
        if key == "own":
            return draw.own() or "no_such_tensor"
        if key == "z":
            return draw.pick(is_float) or self["x"]
        raise KeyError(key)

    def _step(self) -> str:
        """Returns a function of one tensor: an operator, a module, or one that was a region."""
        draw = self.draw
        functions = [region for region in draw.functions if len(region.bindings) == 1]
        modules = draw.set_up_names("m")
        kind = draw.random.choice(["operator"] * 3 + ["module"] * bool(modules) + ["function"] * 2 * bool(functions))
        if kind == "function":
            return draw.random.choice(functions).name
        if kind == "module":
            return draw.random.choice(modules)
        step = draw.random.choice(ops.UNARY)
        if draw.has("random") and draw.chance(0.2):
            step = "F.dropout({x}, 0.3)"
        return f"lambda v: {step.format(x='v')}"


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return all(one in (1, other) for one, other in zip(reversed(shape), reversed(to), strict=False))
