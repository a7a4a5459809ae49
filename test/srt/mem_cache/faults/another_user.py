"""Acting as a user who may not do everything: root may, so tests of permissions become somebody else for a while."""

from __future__ import annotations

import encodings.latin_1  # noqa: F401 - imported late, it would have to come from where only root may read
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of the user that `unprivileged` acts as, at a place that this user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def unprivileged() -> Iterator[None]:
    """This process without root's rights to read and write everything; nothing happens if it never had them."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
