"""The contract of `HiCacheStorage` as tests: a back end subclasses `StorageContract` and provides `storage`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from storage_kit import PAGE_BYTES, SPACE, WAIT_S, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.errors import StorageUnavailableError
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey


class StorageContract(ABC):
    """Every test of it must pass for every storage."""

    @abstractmethod
    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        """An empty storage."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> HiCacheStorage:
        return self.open(tmp_path, SPACE)

    def test_what_is_set_is_got_back(self, storage: HiCacheStorage) -> None:
        keys, pages = make_keys(5), [make_page(i) for i in range(5)]
        assert storage.set(keys, [[page] for page in pages]) == [True] * 5
        for found, page in zip(storage.get(keys), pages, strict=True):
            assert found is not None
            assert found.dtype == np.uint8
            assert found.shape == (PAGE_BYTES,)
            np.testing.assert_array_equal(found, page)

    def test_an_empty_batch_is_fine(self, storage: HiCacheStorage) -> None:
        assert (
            storage.get([]) == storage.set([], []) == storage.exists([]) == storage.delete([]) == []
        )

    def test_a_page_may_come_in_pieces(self, storage: HiCacheStorage) -> None:
        (key,), page = make_keys(1), make_page(1)
        pieces = [
            page[:600].view(np.float32).reshape(3, 50),
            np.empty((0, 4), np.int8),
            page[600:604].view(np.int32).reshape(()),
            page[604:].view(np.uint16),
        ]
        assert storage.set([key], [pieces]) == [True]
        (found,) = storage.get([key])
        np.testing.assert_array_equal(found, page)

    def test_what_was_never_set_is_a_miss(self, storage: HiCacheStorage) -> None:
        keys = make_keys(3)
        assert storage.set([keys[1]], [[make_page(1)]]) == [True]
        assert storage.exists(keys) == [False, True, False]
        first, second, third = storage.get(keys)
        assert first is None
        assert second is not None
        assert third is None

    def test_delete_removes_and_is_idempotent(self, storage: HiCacheStorage) -> None:
        keys = make_keys(2)
        storage.set(keys, [[make_page(1)], [make_page(2)]])
        assert storage.delete([keys[0]]) == [True]
        assert storage.delete([keys[0]]) == [False]
        assert storage.exists(keys) == [False, True]
        assert storage.get([keys[0]]) == [None]
        assert storage.set([keys[0]], [[make_page(1)]]) == [True]
        assert storage.exists(keys) == [True, True]

    def test_pages_are_listed_and_cleared_or_it_says_that_it_cannot(
        self, storage: HiCacheStorage
    ) -> None:
        keys = make_keys(3)
        storage.set(keys, [[make_page(i)] for i in range(3)])
        if type(storage).iter_keys is HiCacheStorage.iter_keys:
            with pytest.raises(StorageUnavailableError, match="cannot list its pages"):
                storage.clear()
            assert storage.exists(keys) == [True] * 3
            return
        assert sorted(storage.iter_keys()) == sorted(keys)
        storage.delete(keys[:1])
        assert sorted(storage.iter_keys()) == sorted(keys[1:])
        assert storage.clear() == 2
        assert list(storage.iter_keys()) == []
        assert storage.exists(keys) == [False] * 3

    def test_setting_again_is_success(self, storage: HiCacheStorage) -> None:
        (key,) = make_keys(1)
        assert storage.set([key, key], [[make_page(1)]] * 2) == [True, True]
        assert storage.set([key], [[make_page(1)]]) == [True]
        np.testing.assert_array_equal(storage.get([key])[0], make_page(1))

    def test_a_result_belongs_to_the_caller(self, storage: HiCacheStorage) -> None:
        (key,), source = make_keys(1), make_page(1)
        storage.set([key], [[source]])
        source[:] = 0
        first, second = storage.get([key, key])
        assert first is not None
        first[:] = 0
        np.testing.assert_array_equal(second, make_page(1))
        np.testing.assert_array_equal(storage.get([key])[0], make_page(1))

    @pytest.mark.parametrize("key", [b"", b"k" * 31, b"k" * 33, "k" * 32])
    def test_a_wrong_key_is_refused(self, storage: HiCacheStorage, key: PageKey) -> None:
        good = make_keys(1)[0]
        for call in (storage.get, storage.exists, storage.delete):
            with pytest.raises(ValueError, match="32 bytes"):
                call([good, key])
        with pytest.raises(ValueError, match="32 bytes"):
            storage.set([good, key], [[make_page(1)]] * 2)
        assert storage.exists([good]) == [False]

    @pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1])
    def test_a_payload_of_wrong_size_is_refused(
        self, storage: HiCacheStorage, num_bytes: int
    ) -> None:
        keys = make_keys(2)
        with pytest.raises(ValueError, match=f"{PAGE_BYTES} bytes, found {num_bytes}"):
            storage.set(keys, [[make_page(1)], [make_page(2, num_bytes)]])
        assert storage.exists(keys) == [False, False]

    def test_a_strided_payload_and_unpaired_arguments_are_refused(
        self, storage: HiCacheStorage
    ) -> None:
        keys = make_keys(2)
        with pytest.raises(ValueError, match="not C-contiguous"):
            storage.set(keys[:1], [[make_page(1, 2 * PAGE_BYTES)[::2]]])
        with pytest.raises(ValueError, match="2 keys for 1 pages"):
            storage.set(keys, [[make_page(1)]])

    def test_close_is_idempotent_and_final(self, storage: HiCacheStorage) -> None:
        storage.close()
        storage.close()
        with pytest.raises(ValueError, match="closed"):
            storage.get(make_keys(1))

    def test_threads_on_one_key_see_the_page_or_nothing(self, storage: HiCacheStorage) -> None:
        (key,), page = make_keys(1), make_page(1)
        start = threading.Barrier(4)

        def worker(number: int) -> list[str]:
            start.wait(WAIT_S)
            faults = []
            for step in range(150):
                if (number + step) % 4 == 0:
                    storage.delete([key])
                elif (number + step) % 2:
                    if storage.set([key], [[page]]) != [True]:
                        faults.append(f"{number}/{step}: set failed")
                else:
                    (found,) = storage.get([key])
                    if found is not None and not np.array_equal(found, page):
                        faults.append(f"{number}/{step}: other bytes")
            return faults

        with ThreadPoolExecutor(4) as pool:
            assert [fault for faults in pool.map(worker, range(4)) for fault in faults] == []
