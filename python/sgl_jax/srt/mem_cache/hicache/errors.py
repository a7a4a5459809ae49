"""The tree of HiCache errors.

    HiCacheError
    ├── HiCacheConfigError (also ValueError)   a flag, path or model the cache cannot work with; raised at start only
    ├── PageStateError                         a host page was used against its state: double free, freed while pinned
    ├── InvariantError                         check_invariants() found a broken fact
    └── StorageError
        ├── StorageCorruptionError             a page file is short, damaged or foreign
        ├── StorageUnavailableError            the storage cannot be used now (disk full, directory gone, no permission)
        └── StorageAttachError                 attach where a storage is attached, detach where none is

A miss, no room and not-yet are values, never errors. A worker never raises into the scheduler: it returns a
`TransferResult` whose `error` is set.
"""


class HiCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class HiCacheConfigError(HiCacheError, ValueError):
    """A wrong flag value, an unusable path or a model the cache cannot hold; found at start."""


class PageStateError(HiCacheError):
    """A host page was asked to leave its life cycle (see `host_pool.page_table.PageState`)."""


class InvariantError(HiCacheError):
    """An invariant named in `check_invariants()` does not hold; the message carries the numbers."""


class StorageError(HiCacheError):
    """Base of what can go wrong below the host tier."""


class StorageCorruptionError(StorageError):
    """A page file is short, damaged, or belongs to another key, layout or model."""


class StorageUnavailableError(StorageError):
    """The storage cannot be read or written at present."""


class StorageAttachError(StorageError):
    """A storage is to be attached where one is, or detached where none is, or there is no host tier above it."""
