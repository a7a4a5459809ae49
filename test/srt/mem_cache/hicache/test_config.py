"""HiCacheConfig and its flags: what is allowed, what is refused and in which words."""

from __future__ import annotations

import argparse
import enum
import math
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.srt.mem_cache.hicache.config import (
    AsyncImpl,
    HiCacheConfig,
    HostScheme,
    PrefetchPolicy,
    StorageKind,
    WritePolicy,
)
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError


def parse(*argv: str) -> HiCacheConfig:
    parser = argparse.ArgumentParser()
    HiCacheConfig.add_cli_args(parser)
    return HiCacheConfig.from_args(parser.parse_args(argv))


def refusal(*argv: str) -> str:
    with pytest.raises(HiCacheConfigError) as caught:
        parse(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_flags_hicache_is_off() -> None:
    config = parse()
    assert config == HiCacheConfig()
    assert not config.enabled
    assert not config.has_storage


def test_documented_defaults() -> None:
    config = parse("--hicache-storage", "none")
    assert config.enabled
    assert not config.has_storage
    assert config.ratio == 2.0
    assert config.storage_path == Path("~/.cache/sgl-jax/hicache").expanduser()
    assert config.write_policy is WritePolicy.WRITE_THROUGH
    assert config.storage_prefetch_policy is PrefetchPolicy.WAIT_COMPLETE
    assert config.prefetch_threshold == 0


def test_every_flag_sets_its_field(tmp_path: Path) -> None:
    config = parse(
        *("--hicache-storage", "file", "--hicache-ratio", "0.5"),
        *("--hicache-storage-path", str(tmp_path)),
        *("--hicache-write-policy", "write_through_and_back"),
        *("--hicache-async-impl", "future", "--hicache-host-scheme", "slab"),
        *("--hicache-prefetch-deadline-s", "1.5", "--hicache-storage-max-bytes", "10GiB"),
        *("--hicache-storage-prefetch-policy", "timeout", "--hicache-prefetch-threshold", "256"),
        *("--hicache-checkpoint-interval", "128"),
    )
    assert config == HiCacheConfig(
        storage=StorageKind.FILE,
        ratio=0.5,
        storage_path=tmp_path,
        write_policy=WritePolicy.WRITE_THROUGH_AND_BACK,
        async_impl=AsyncImpl.FUTURE,
        host_scheme=HostScheme.SLAB,
        prefetch_deadline_s=1.5,
        storage_max_bytes=10 * 2**30,
        storage_prefetch_policy=PrefetchPolicy.TIMEOUT,
        prefetch_threshold=256,
        checkpoint_interval=128,
    )
    assert config.has_storage


@pytest.mark.parametrize(
    ("flag", "choices"),
    [
        ("--hicache-storage", StorageKind),
        ("--hicache-write-policy", WritePolicy),
        ("--hicache-storage-prefetch-policy", PrefetchPolicy),
        ("--hicache-async-impl", AsyncImpl),
        ("--hicache-host-scheme", HostScheme),
    ],
)
def test_an_unknown_choice_names_the_allowed_ones(flag: str, choices: type[enum.Enum]) -> None:
    argv = [flag, "mooncake"]
    if flag != "--hicache-storage":
        argv += ["--hicache-storage", "none"]
    message = refusal(*argv)
    assert message.startswith(f"{flag} mooncake")
    for choice in choices:
        assert str(choice.value) in message


@pytest.mark.parametrize("flag", ["--hicache-ratio", "--hicache-prefetch-deadline-s"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "two", "", "1e999"])
def test_a_number_must_be_finite_and_positive(flag: str, value: str) -> None:
    message = refusal("--hicache-storage", "file", f"{flag}={value}")
    assert message.startswith(flag)
    assert "greater than 0" in message


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--hicache-storage-path", "somewhere"),
        ("--hicache-write-policy", "write_through"),
        ("--hicache-prefetch-deadline-s", "1"),
        ("--hicache-storage-max-bytes", "0"),
        ("--hicache-storage-prefetch-policy", "wait_complete"),
        ("--hicache-prefetch-threshold", "0"),
    ],
)
def test_a_flag_about_files_is_refused_without_files(flag: str, value: str) -> None:
    message = refusal("--hicache-storage", "none", flag, value)
    assert message.startswith(f"{flag} has no effect with --hicache-storage none")


@pytest.mark.parametrize("name", ["ratio", "prefetch_deadline_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1.0, True, "2", None])
def test_numbers_given_in_code_are_judged_alike(name: str, value: Any) -> None:
    with pytest.raises(HiCacheConfigError, match="greater than 0"):
        HiCacheConfig(**{name: value})


@pytest.mark.parametrize(
    "name",
    [
        *("storage", "write_policy", "async_impl", "host_scheme", "storage_path"),
        "storage_prefetch_policy",
    ],
)
def test_text_in_place_of_a_typed_value_is_refused(name: str) -> None:
    with pytest.raises(HiCacheConfigError, match=f"--hicache-{name.replace('_', '-')}"):
        HiCacheConfig(**{name: "file"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "argv",
    [
        ("--hicache-ratio", "2.0"),  # also when it is the default: it was asked for
        ("--hicache-storage-path", "/tmp"),
        ("--hicache-write-policy", "write_through"),
    ],
)
def test_a_flag_without_storage_is_refused(argv: tuple[str, str]) -> None:
    message = refusal(*argv)
    assert message.startswith(argv[0])
    assert "--hicache-storage" in message


def test_an_empty_path_is_refused() -> None:
    assert "path" in refusal("--hicache-storage", "file", "--hicache-storage-path", "")


def test_a_flag_without_value_exits_with_status_2() -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--hicache-storage")
    assert caught.value.code == 2


def test_help_says_that_none_is_not_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "none = device and host memory only (L1 + L2)" in text
    assert "without this flag HiCache is off" in text


@pytest.mark.parametrize(
    ("flag", "smallest"),
    [("--hicache-prefetch-threshold", 0), ("--hicache-checkpoint-interval", 1)],
)
@pytest.mark.parametrize("value", ["-1", "1.5", "ten", "", "1e3"])
def test_a_count_of_tokens_is_a_whole_number(flag: str, smallest: int, value: str) -> None:
    message = refusal("--hicache-storage", "file", f"{flag}={value}")
    assert message == f"{flag} {value}: not allowed; give a whole number of at least {smallest}"


@pytest.mark.parametrize("value", [-1, 1.5, True, "256", None])
def test_a_threshold_given_in_code_is_an_int(value: Any) -> None:
    with pytest.raises(HiCacheConfigError, match="--hicache-prefetch-threshold"):
        HiCacheConfig(prefetch_threshold=value)


def test_a_deadline_for_a_policy_that_never_waits_is_refused() -> None:
    policy = ("--hicache-storage-prefetch-policy", "best_effort")
    message = refusal("--hicache-storage", "file", *policy, "--hicache-prefetch-deadline-s", "1")
    assert message.startswith("--hicache-prefetch-deadline-s has no effect")
    assert parse("--hicache-storage", "file", *policy).prefetch_rules.policy is (
        PrefetchPolicy.BEST_EFFORT
    )


@pytest.mark.parametrize("value", ["-1", "ten", "", "1.5XB", "nan", "1e9", "10 GiB more"])
def test_a_size_is_a_number_of_bytes_with_a_unit(value: str) -> None:
    message = refusal("--hicache-storage", "file", f"--hicache-storage-max-bytes={value}")
    assert message.startswith("--hicache-storage-max-bytes")
    assert "10GiB" in message


@pytest.mark.parametrize("value", [-1, 1.5, True, "10GiB", None])
def test_a_size_given_in_code_is_an_int(value: Any) -> None:
    with pytest.raises(HiCacheConfigError, match="--hicache-storage-max-bytes"):
        HiCacheConfig(storage_max_bytes=value)


def test_an_unknown_home_is_refused() -> None:
    with pytest.raises(HiCacheConfigError, match="~ names a known user"):
        HiCacheConfig(storage_path=Path("~no-such-user-here/x"))
