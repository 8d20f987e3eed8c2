"""The index of whole rows: killed, cut, altered, copied."""

import os
from pathlib import Path

import pytest

from spec_compat.pipeline import atomic
from spec_compat.pipeline.index import Index, entry


def path(directory: Path, number: int) -> Path:
    return directory / f"data_{number}.pt"


def add(index: Index, directory: Path, number: int) -> None:
    file = path(directory, number)
    with atomic.replacing(file) as stream:
        stream.write(b"states" * (number + 1))
    index.add(number, entry(file, number + 10, atomic.sha256(file)))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Rows 0 to 3 in another order, by a process that was killed: the index was never closed."""
    index = Index(tmp_path)
    for number in (2, 0, 3, 1):
        add(index, tmp_path, number)
    return tmp_path


def test_what_was_added_is_there_without_closing(written: Path) -> None:
    index = Index(written)
    assert list(index) == [0, 1, 2, 3]
    assert index.lengths() == {0: 10, 1: 11, 2: 12, 3: 13}
    assert index.bytes == 6 * (1 + 2 + 3 + 4)
    assert not index.check(lambda number: path(written, number), thorough=True)


def test_closed_it_is_in_order_and_one_line_a_row(written: Path) -> None:
    index = Index(written)
    add(index, written, 1)
    index.close()
    assert [line.split()[0] for line in index.file.read_text().splitlines()] == ["0", "1", "2", "3"]
    assert Index(written).digest() == index.digest()


def test_a_cut_last_line_costs_its_row_alone(written: Path) -> None:
    file = Index(written).file
    whole = file.read_bytes()
    for cut in (1, 2, 9, 40, len(whole.splitlines()[-1])):
        file.write_bytes(whole[:-cut])
        index = Index(written)
        assert list(index) == [0, 2, 3]
        add(index, written, 1)
        assert list(Index(written)) == [0, 1, 2, 3]


def test_no_altered_byte_is_believed(written: Path) -> None:
    file = Index(written).file
    whole, before = file.read_bytes(), Index(written)
    known = {number: before[number] for number in before}
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 4
        file.write_bytes(altered)
        index = Index(written)
        assert len(index) >= 2
        assert all(index[number] == known[number] for number in index)


def test_a_file_that_is_gone_cut_or_altered_is_found(written: Path) -> None:
    path(written, 0).unlink()
    os.truncate(path(written, 1), 3)
    path(written, 2).write_bytes(b"STATES" * 3)
    found = Index(written).check(lambda number: path(written, number))
    assert found == {
        0: "the file is missing",
        1: "it has 3 bytes, not 12",
        2: "its checksum is not the one recorded",
    }


def test_a_copy_is_read_and_believed(written: Path) -> None:
    for number in range(4):
        os.utime(path(written, number))
    assert not Index(written).check(lambda number: path(written, number))


def test_an_altered_byte_under_the_old_time_needs_a_thorough_check(written: Path) -> None:
    file = path(written, 2)
    time = file.stat().st_mtime_ns
    file.write_bytes(b"STATES" * 3)
    os.utime(file, ns=(time, time))
    assert not Index(written).check(lambda number: path(written, number))
    found = Index(written).check(lambda number: path(written, number), thorough=True)
    assert found == {2: "its checksum is not the one recorded"}
