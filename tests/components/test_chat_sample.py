"""A sample is read as it was written, and long texts lose their middle."""

from __future__ import annotations

from pathlib import Path

from components.chat_sample import SampleRow, cut_in_middle, read_sample_rows, write_sample_rows


def test_a_sample_is_read_as_it_was_written(tmp_path: Path) -> None:
    row: SampleRow = {
        "row_id": "a",
        "split": "train",
        "workload": "chat",
        "language": "zh",
        "domain": "",
        "answered_by": "target",
        "pieces": [{"role": "assistant", "masked": True, "text": "你好 </script>\u2028"}],
    }
    assert read_sample_rows(tmp_path) == []
    write_sample_rows(tmp_path, [row])
    assert read_sample_rows(tmp_path) == [row]


def test_long_texts_lose_their_middle() -> None:
    assert cut_in_middle("abcdef", 6) == "abcdef"
    assert cut_in_middle("abcdef", 4) == "ab [... 2 characters ...] ef"
