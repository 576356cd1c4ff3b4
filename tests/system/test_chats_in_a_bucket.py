"""Chats in a real object store are read like files; a store that is gone is one line, and loses no row unsaid."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from collected_chats import collect, rows, write_lines
from object_store import BUCKET, ObjectStore, object_store

from components.contract import UserError
from components.data.formats.chats import read_chats

pytestmark = pytest.mark.system


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A bucket with two files of chats under chats/."""
    import s3fs

    lines = write_lines(tmp_path / "rows.jsonl", rows(6)).read_bytes()
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        store.client().put_object(Bucket=BUCKET, Key="chats/a.jsonl.gz", Body=gzip.compress(lines))
        store.client().put_object(Bucket=BUCKET, Key="chats/deep/b.jsonl", Body=lines.replace(b"town", b"city"))
        yield store
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_prefix_a_pattern_and_an_object_give_their_rows(bucket: ObjectStore, tmp_path: Path) -> None:
    made = collect(tmp_path / "prefix", {"path": f"s3://{BUCKET}/chats", "name": "n"})
    assert [chat.where for chat in read_chats(made)] == [
        f"{name}:{line}" for name in ("a.jsonl.gz", "deep/b.jsonl") for line in range(1, 7)
    ]
    assert collect(tmp_path / "pattern", {"path": f"s3://{BUCKET}/chats/*.gz", "name": "n"}).info["num_rows"] == 6
    assert collect(tmp_path / "object", f"s3://{BUCKET}/chats/deep/b.jsonl").info["num_rows"] == 6
    with pytest.raises(UserError, match="no such file"):
        collect(tmp_path / "none", f"s3://{BUCKET}/nothing/here.jsonl")


def test_a_store_that_does_not_answer_is_one_line(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nobody listens
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match="not to be had") as refused:
        collect(tmp_path / "out", f"s3://{BUCKET}/chats/deep/b.jsonl")
    assert "\n" not in str(refused.value)
