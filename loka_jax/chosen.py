"""What runs at the sites of a converted model for which nobody chose.

What chooses knows times and lies above the modules, so it is given here by the package.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from loka_jax.site import Choice


class Chosen(NamedTuple):
    """What runs at a site, and why.

    Attributes:
        choice: in bfloat16; None for the product as written.
    """

    choice: "Choice | None"
    reason: str


# Takes the sites of a model, as `nn.list_sites` lists them, and the paths of those
# whose operands are float32; returns what runs at those that are open, by path.
type Choose = Callable[[Sequence[Any], Collection[str]], Mapping[str, Chosen]]

_chooses: list[Choose] = []


def use(choose: Choose) -> None:
    """Sets what chooses."""
    _chooses[:] = [choose]


def choose(sites: Sequence[Any], in_float32: Collection[str]) -> Mapping[str, Chosen]:
    """Returns what runs at the sites that are open, by path."""
    (function,) = _chooses
    return function(sites, in_float32)
