"""The faults tests borrow the worlds of the parts they cross: storage, tree, engine."""

from __future__ import annotations

import sys
from pathlib import Path

_MEM_CACHE = Path(__file__).parents[1]
for folder in ("hicache/storage", "tree", "engine"):
    sys.path.append(str(_MEM_CACHE / folder))
