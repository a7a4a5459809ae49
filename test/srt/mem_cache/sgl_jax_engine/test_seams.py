"""An engine that is not as expected is refused with one line that says where, and what was tested."""

from __future__ import annotations

import pytest

from sgl_jax_hicache.sgl_jax_engine import seams
from sgl_jax_hicache.sgl_jax_engine.errors import TESTED_COMMIT, EngineMismatchError
from sgl_jax_hicache.sgl_jax_engine.seams import Seam

HERE = __name__


def helper() -> int:
    return 1


class Thing:
    """Something with seams."""

    def runs(self, count: int) -> int:
        """Looks `helper` up when it runs, and a name in a nested function."""

        def inner() -> int:
            return int(getattr(self, "optional", 0))

        return helper() + inner() + count


def test_as_expected() -> None:
    seams.check([Seam(HERE, "Thing.runs", ("self", "count"), ("helper", "optional", "inner"))])


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (
            Seam("no_such_engine.scheduler", "Scheduler", ()),
            "no_such_engine.scheduler.Scheduler is not there",
        ),
        (Seam(HERE, "Thing.walks", ("self",)), "Thing.walks is not there"),
        (Seam(HERE, "Thing.runs", ("self", "number")), "takes (self, count), not (self, number)"),
        (Seam(HERE, "Thing.runs", ("self", "count"), ("tree_cache",)), "does not use tree_cache"),
    ],
)
def test_each_difference_is_told(seam: Seam, said: str) -> None:
    with pytest.raises(EngineMismatchError) as caught:
        seams.check([seam])
    message = str(caught.value)
    assert said in message
    assert TESTED_COMMIT in message
    assert "\n" not in message
