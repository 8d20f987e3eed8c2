"""The index of whole rows: killed, cut, altered, copied."""

import os
import time
from pathlib import Path

import pytest

from spec_compat.pipeline.rows import index as rows_index
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.system import atomic


def add(index: Index, number: int) -> None:
    """File n holds the rows 2n and 2n+1."""
    file = index.directory / f"f{number}"
    with atomic.replacing(file) as stream:
        stream.write(b"states" * (number + 1))
    index.add(file.name, atomic.sha256(file), {2 * number: 10, 2 * number + 1: number})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Files 0 to 3 in another order, by a process that was killed: the index was never closed."""
    index = Index(tmp_path)
    for number in (2, 0, 3, 1):
        add(index, number)
    return tmp_path


def test_what_was_added_is_there_without_closing(written: Path) -> None:
    index = Index(written)
    assert list(index) == list(range(8))
    assert (index.holder(3), index.length(3), index.length(2)) == ("f1", 1, 10)
    assert index.bytes == 6 * (1 + 2 + 3 + 4)
    assert not index.check(thorough=True)


def test_closed_it_is_in_order_and_one_line_a_file(written: Path) -> None:
    index = Index(written)
    add(index, 1)
    index.close()
    names = [line.split()[0] for line in index.file.read_text().splitlines()]
    assert names == ["f0", "f1", "f2", "f3"]
    assert Index(written).digest() == index.digest()


def test_a_row_that_another_file_has_by_now_stays_when_its_first_one_is_written_anew(
    tmp_path: Path,
) -> None:
    """A run goes on with a smaller KV cache: what was one shard is two, written in any order."""
    index = Index(tmp_path)
    for name, rows in (("shard_0", range(6)), ("shard_3", range(3, 6)), ("shard_0", range(3))):
        (tmp_path / name).write_text(name)
        index.add(name, atomic.sha256(tmp_path / name), dict.fromkeys(rows, 1))
    for there in (index, Index(tmp_path)):
        assert [there.holder(row) for row in there] == ["shard_0"] * 3 + ["shard_3"] * 3


def test_rows_that_a_file_has_no_more_when_it_is_written_anew_are_missing(tmp_path: Path) -> None:
    index = Index(tmp_path)
    for rows in (range(6), range(3)):
        (tmp_path / "shard_0").write_text(f"{len(rows)} rows")
        index.add("shard_0", atomic.sha256(tmp_path / "shard_0"), dict.fromkeys(rows, 1))
    for there in (index, Index(tmp_path)):
        assert list(there) == [0, 1, 2]


def test_a_cut_last_line_costs_its_rows_alone(written: Path) -> None:
    file = Index(written).file
    whole = file.read_bytes()
    for cut in (1, 2, 9, 40, len(whole.splitlines()[-1])):
        file.write_bytes(whole[:-cut])
        index = Index(written)
        assert list(index) == [0, 1, 4, 5, 6, 7]
        add(index, 1)
        assert list(Index(written)) == list(range(8))


def test_no_altered_byte_is_believed(written: Path) -> None:
    before = Index(written)
    whole = before.file.read_bytes()
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 4
        before.file.write_bytes(altered)
        index = Index(written)
        assert len(index) >= 4
        assert all(index.files[name] == before.files[name] for name in index.files)


def test_a_file_that_is_gone_cut_or_altered_is_found(written: Path) -> None:
    (written / "f0").unlink()
    os.truncate(written / "f1", 3)
    (written / "f2").write_bytes(b"STATES" * 3)
    index = Index(written)
    assert index.check() == {
        "f0": "the file is missing",
        "f1": "it has 3 bytes, not 12",
        "f2": "its checksum is not the one recorded",
    }
    assert list(index) == [6, 7]


def test_other_states_of_the_same_rows_are_another_digest(written: Path) -> None:
    index = Index(written)
    before, rows = index.digest(), index.files["f1"].rows
    os.utime(written / "f1")
    index.add("f1", index.files["f1"].sha256, rows)
    assert index.digest() == before
    (written / "f1").write_bytes(b"STATES" * 2)
    index.add("f1", atomic.sha256(written / "f1"), rows)
    assert index.digest() != before


def test_a_copy_is_read_and_believed(written: Path) -> None:
    for number in range(4):
        os.utime(written / f"f{number}")
    assert not Index(written).check()


def test_a_copy_is_read_once(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(written / "f1")
    index = Index(written)
    assert not index.check()
    assert index.copied
    index.close()

    def read(file: Path) -> str:
        raise AssertionError(f"{file} is read again")

    monkeypatch.setattr(atomic, "sha256", read)
    again = Index(written)
    assert not again.check()
    assert not again.copied
    assert again.digest() == index.digest()


def test_an_altered_byte_under_the_old_time_needs_a_thorough_check(written: Path) -> None:
    file = written / "f2"
    time = file.stat().st_mtime_ns
    file.write_bytes(b"STATES" * 3)
    os.utime(file, ns=(time, time))
    assert not Index(written).check()
    found = Index(written).check(thorough=True)
    assert found == {"f2": "its checksum is not the one recorded"}


def test_no_name_leads_out_of_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "gen"
    directory.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    index = Index(directory)
    index.add("../secret", atomic.sha256(secret), {0: 1})
    assert list(Index(directory)) == []


def test_a_million_rows_are_scanned_in_seconds(tmp_path: Path) -> None:
    """A tenth of them in a tenth of the time; docs/faults.md has what a million take."""
    number, entry = 100_000, rows_index.Entry(123_456, 1_764_500_000_000_000_000, "0" * 64, {})
    with (tmp_path / rows_index.NAME).open("wb") as stream:
        for row in range(number):
            there = entry._replace(rows={row: 1000})
            stream.write(rows_index._line(f"data_{row}.pt", there))

    def seconds() -> float:
        begun = time.process_time()
        Index(tmp_path)
        return time.process_time() - begun

    assert any(seconds() < 1.5 for _ in range(3))  # a busy neighbour takes the caches
    index = Index(tmp_path)
    assert len(index) == number
    assert (index.holder(number - 1), index.length(number - 1)) == (f"data_{number - 1}.pt", 1000)
