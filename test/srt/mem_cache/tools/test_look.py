"""`ls`, `stat` and `show`: what they say of real folders."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tool_kit import FILE_BYTES, OTHER, SPACE, Tools, path_of, set_age, store_chain

from sgl_jax.srt.mem_cache.hicache.page_key import namespace_digest
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink
from sgl_jax_hicache.tools.ages import parse_age, show_age
from sgl_jax_hicache.tools.place import shown_model

WAIT_S = 60.0


def test_ls_lists_models_and_page_sizes(tools: Tools, root: Path) -> None:
    store_chain(root, 3, age_s=3600)
    store_chain(root, 2, space=OTHER)
    store_chain(root, 1, space=replace(SPACE, page_size=16))
    data = tools.run("ls").data
    assert [(e["model"], e["page_size"], e["pages"]) for e in data["models"]] == [
        ("another", 8, 2),
        ("org/model", 16, 1),
        ("org/model", 4, 3),
    ]
    assert data["bytes"] == sum(e["bytes"] for e in data["models"])
    assert data["models"][2]["bytes"] == 3 * FILE_BYTES
    assert 3600 <= data["models"][2]["oldest_s"] < 3700
    text = tools.run("ls", as_json=False).out
    assert "org/model" in text
    assert "1 h 0 min ago" in text
    only = tools.run("ls", "--model", "another").data
    assert [entry["model"] for entry in only["models"]] == ["another"]


def test_ls_of_an_empty_root(tools: Tools) -> None:
    ran = tools.run("ls")
    assert (ran.status, ran.data["models"], ran.data["bytes"]) == (0, [], 0)
    assert "0 pages, 0 B" in tools.run("ls", as_json=False).out


def test_ls_tells_what_is_besides_pages(tools: Tools, root: Path) -> None:
    (key,) = store_chain(root, 1)
    path = path_of(root, key)
    path.write_bytes(bytes(path.stat().st_size))
    assert LocalFileStorage(root, SPACE).get([key]) == [None]
    assert tools.run("ls").data["models"][0]["set_aside"] == 1
    assert "1 damaged, set aside" in tools.run("ls", as_json=False).out


def test_stat_tells_layouts_apart(tools: Tools, root: Path) -> None:
    store_chain(root, 5, age_s=100)
    store_chain(root, 2, 1000)
    state = replace(
        SPACE, layout_id=SPACE.layout_id.replace("|full|", "|recurrent|"), page_bytes=77
    )
    storage = LocalFileStorage(root, state)
    storage.set_linked([PageKey(b"s" * 32)], [[np.zeros(77, np.uint8)]], [PageLink(None, 0)])
    entries = tools.run("stat").data["layouts"]
    full, recurrent = (
        next(e for e in entries if e["component"] == c) for c in ("full", "recurrent")
    )
    assert full["pages"] == 7
    assert full["tokens"] == 28
    assert full["beginnings"] == 2
    assert full["longest_tokens"] == 20
    assert full["cut_off_pages"] == 0
    assert full["bytes"] == 7 * FILE_BYTES
    assert full["namespace_digest"] == namespace_digest(SPACE).hex()
    assert full["format_versions"] == {"2": 7}
    assert 100 <= full["age_s"]["median"] < 150
    assert (recurrent["pages"], recurrent["page_bytes"], recurrent["tokens"]) == (1, 77, None)
    text = tools.run("stat", as_json=False).out
    assert "recurrent, one state, bfloat16, 77 B" in text


def test_stat_counts_what_is_cut_off_and_what_has_no_header(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 5)
    path_of(root, keys[1]).unlink()
    path_of(root, keys[4]).write_bytes(b"no header")
    data = tools.run("stat").data
    assert data["layouts"][0]["cut_off_pages"] == 2
    assert data["unreadable_headers"] == 1
    assert "run verify" in tools.run("stat", as_json=False).out


def test_show_tells_a_page_and_its_chain(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 6)
    ran = tools.run("show", keys[4].hex())
    data = ran.data
    assert ran.status == 0
    assert data["whole"]
    assert data["path"] == str(path_of(root, keys[4]))
    assert (data["model"], data["component"], data["shard"]) == ("org/model", "full", "0/1")
    assert (data["first_token"], data["end_token"], data["index"]) == (16, 20, 4)
    assert data["parent"] == keys[3].hex()
    assert [b["key"] for b in data["before"]] == [key.hex() for key in keys[3::-1]]
    assert all(b["stored"] for b in data["before"])
    text = tools.run("show", keys[4].hex(), as_json=False).out
    assert "All pages before it (4) are stored" in text
    assert "16 to 19 of its prompt" in text
    first = tools.run("show", keys[0].hex()).data
    assert (first["parent"], first["before"], first["index"]) == (None, [], 0)


def test_show_takes_a_beginning_or_a_file(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 3)
    for name in (keys[1].hex()[:8], keys[1].hex()[:8].upper(), str(path_of(root, keys[1]))):
        assert tools.run("show", name).data["key"] == keys[1].hex()


def test_show_stops_at_a_missing_page(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 6)
    path_of(root, keys[2]).unlink()
    data = tools.run("show", keys[5].hex()).data
    assert [(b["index"], b["stored"]) for b in data["before"]] == [(4, True), (3, True), (2, False)]
    assert (
        "2 of 5 pages before it are stored" in tools.run("show", keys[5].hex(), as_json=False).out
    )


def test_show_of_a_long_chain_is_short_for_people(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 40)
    assert len(tools.run("show", keys[39].hex()).data["before"]) == 39
    text = tools.run("show", keys[39].hex(), as_json=False).out
    assert "31 more" in text
    assert len(text.splitlines()) < 35


def test_show_of_what_is_kept_beside_full_pages(tools: Tools, root: Path) -> None:
    """A window's page hangs off the Full page of the same tokens."""
    keys = store_chain(root, 3)
    swa = replace(SPACE, layout_id=SPACE.layout_id.replace("|full|", "|swa|"))
    beside = PageKey(b"w" * 32)
    page = [np.zeros(1000, np.uint8)]
    LocalFileStorage(root, swa).set_linked([beside], [page], [PageLink(keys[2], 3)])
    data = tools.run("show", beside.hex()).data
    assert (data["component"], data["first_token"], data["end_token"]) == ("swa", 8, 12)
    assert [b["index"] for b in data["before"]] == [2, 1, 0]


def test_show_of_a_page_without_a_link(tools: Tools, root: Path) -> None:
    key = PageKey(b"k" * 32)
    LocalFileStorage(root, SPACE).set([key], [[np.zeros(1000, np.uint8)]])
    assert tools.run("show", key.hex()).data["before"] == []
    assert "does not say" in tools.run("show", key.hex(), as_json=False).out


def test_show_of_a_damaged_page_ends_with_1(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 2)
    path = path_of(root, keys[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ran = tools.run("show", keys[0].hex())
    assert (ran.status, ran.data["whole"]) == (1, False)
    assert "payload" in ran.data["reason"]
    path.write_bytes(path_of(root, keys[1]).read_bytes())
    ran = tools.run("show", keys[0].hex(), as_json=False)
    assert ran.status == 1
    assert f"holds the page {keys[1].hex()}" in " ".join(ran.out.split())


def test_a_chain_of_damaged_links_ends(tools: Tools, root: Path) -> None:
    storage = LocalFileStorage(root, SPACE)
    one, two = PageKey(b"1" * 32), PageKey(b"2" * 32)
    page = [np.zeros(1000, np.uint8)]
    storage.set_linked([one, two], [page, page], [PageLink(two, 9), PageLink(one, 9)])
    assert len(tools.run("show", one.hex()).data["before"]) == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "invalid choice"),
        (("ls", "--nonsense"), "unrecognized"),
        (("ls", "--path", "/nowhere/at/all"), "No such file"),
        (("ls", "--model", "nobody"), "no such model; it has org/model"),
        (("ls", "--model", "../.."), "no such model"),
        (("ls", "--model", ".."), "no such model"),
        (("show", "xyz"), "4 to 64 hexadecimal digits"),
        (("show", "abc"), "4 to 64 hexadecimal digits"),
        (("show", "0000" * 16), "no such page"),
        (("gc",), "give --max-bytes, --max-age or both"),
        (("gc", "--max-bytes", "much"), "--max-bytes 'much'"),
        (("gc", "--max-age", "long"), "--max-age 'long'"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_line(
    tools: Tools, root: Path, argv: tuple[str, ...], expected: str
) -> None:
    store_chain(root, 1)
    ran = tools.run(*argv) if argv else tools.run("nonsense")
    assert ran.status == 2
    assert expected in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""


def test_more_than_one_page_of_that_name_is_told(tools: Tools, root: Path) -> None:
    storage = LocalFileStorage(root, SPACE)
    keys = [PageKey(b"\xab\xcd" + bytes([number]) * 30) for number in range(2)]
    storage.set(keys, [[np.zeros(1000, np.uint8)]] * 2)
    ran = tools.run("show", "abcd")
    assert ran.status == 2
    assert "2 pages begin like that: abcd00000000, abcd01010101" in ran.err
    assert tools.run("show", "abcd00").status == 0


def test_a_root_of_somebody_else_is_refused(tools: Tools, root: Path) -> None:
    store_chain(root, 1)
    root.chmod(0o777)
    ran = tools.run("ls")
    assert ran.status == 2
    assert "can be written to by others" in ran.err


def test_nothing_is_changed_by_looking(tools: Tools, root: Path) -> None:
    keys = store_chain(root, 3)
    set_age(root, keys, 10_000)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    for argv in (
        ("ls",),
        ("stat",),
        ("verify",),
        ("show", keys[2].hex()),
        ("gc", "--max-bytes", "0"),
    ):
        assert tools.run(*argv).status == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_the_program_runs_by_its_module_name_and_survives_a_closed_pipe(root: Path) -> None:
    store_chain(root, 1)
    command = [sys.executable, "-m", "sgl_jax_hicache.tools", "ls", "--path", str(root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("folder", "model"),
    [("org%2Fmodel", "org/model"), ("%2Ehidden", ".hidden"), ("%empty", ""), ("m%C3%A9", "mé")],
)
def test_folders_have_their_models_names(folder: str, model: str) -> None:
    assert shown_model(folder) == model


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604_800), ("2 w", 1_209_600)],
)
def test_ages_that_are_taken(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "1y", "d", "1e3", "7 days"])
def test_ages_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="7d"):
        parse_age(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (125, "2 min 5 s"),
        (3600, "1 h 0 min"),
        (270_000, "3 d 3 h"),
        (-5, "0 s"),
    ],
)
def test_ages_are_printed_in_two_units(seconds: float, text: str) -> None:
    assert show_age(seconds) == text
