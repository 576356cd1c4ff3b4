"""A real S3 server on loopback (moto), whose bucket is empty and whose password the tests can look for everywhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKET = "team"
SECRET = "K7secretOfTheTeam/mustNeverBeWritten"


@dataclass(frozen=True)
class ObjectStore:
    """Where it answers; `environment` is all that a user sets."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "DRAFTSMITH_STORE": f"s3://{BUCKET}/drafts",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "ada",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """A boto3 client: what an administrator sees, by other code than ours."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="ada",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def names(self, prefix: str = "") -> list[str]:
        """Names of all objects under drafts/PREFIX."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"drafts/{prefix}")
        return [item["Key"] for page in pages for item in page.get("Contents", [])]


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start it on a free port with one empty bucket; stop it at the end."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        store = ObjectStore(f"http://{host}:{port}")
        store.client().create_bucket(Bucket=BUCKET)
        yield store
    finally:
        server.stop()
