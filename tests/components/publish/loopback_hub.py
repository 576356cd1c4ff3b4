"""A model hub on loopback: as much of the Hugging Face hub's upload API as huggingface_hub 2.4 speaks, over real HTTP.

Repositories with branches and commits; the preupload question, the Git LFS batch, PUT and verify, the commit as ndjson,
the tree, single files. Large files by their name (*.safetensors). Everything sent is kept and every request is noted,
so that tests can say what went over the wire. Callers without the right token see public repositories only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


def git_oid(content: bytes) -> str:
    """What git calls a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """branch -> commits, the newest last; a commit is (id, message, path -> content)."""

    private: bool
    branches: dict[str, list[tuple[str, str, dict[str, bytes]]]] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> str:
        """Add a commit; gives its id."""
        history = self.branches.setdefault(branch, [])
        text = f"{len(history)} {message} {sorted((name, git_oid(raw)) for name, raw in files.items())}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        history.append((oid, message, files))
        return oid

    def find(self, revision: str) -> tuple[str, str, dict[str, bytes]] | None:
        """The commit that a branch or an id names."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((one for history in self.branches.values() for one in history if one[0] == revision), None)


class LoopbackHub(ThreadingHTTPServer):
    """Start it as a context manager; `url` is what HF_ENDPOINT takes.

    repositories: name -> Repository. large: sha256 -> content. requests: "METHOD path". failing: part of a path ->
    status to answer with, as often as its count says.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.failing: dict[str, tuple[int, int]] = {}
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def add(self, name: str, *, private: bool, files: dict[str, bytes] | None = None) -> Repository:
        """A repository with the first commit that the hub itself makes."""
        made = self.repositories[name] = Repository(private)
        made.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})})
        return made

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """What the branch of a repository holds."""
        return self.repositories[name].branches[branch][-1][2]

    def messages(self, name: str, branch: str = "main") -> list[str]:
        """Its commits' messages, oldest first."""
        return [message for _, message, _ in self.repositories[name].branches[branch]]


class _Answer(BaseHTTPRequestHandler):
    server: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        token = str(self.headers.get("Authorization") or "").removeprefix("Bearer ")
        with self.server.lock:
            self.server.requests.append(f"{self.command} {path}")
            self.server.tokens.add(token)
            for part, (status, times) in list(self.server.failing.items()):
                if part in path and times:
                    self.server.failing[part] = (status, times - 1)
                    return self._say({"error": "the hub is unwell"}, status)
            return self._route(path, body, token == TOKEN)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _route(self, path: str, body: bytes, known: bool) -> None:
        if path == "/api/validate-yaml":
            return self._say({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body), known)
        if path.startswith("/lfs/"):
            return self._take_large(path, body)
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "api":
            name, rest = "/".join(parts[2:4]), parts[4:]
        else:
            name, rest = "/".join(parts[0:2]).removesuffix(".git"), parts[2:]
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not known):
            return self._say({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if self.command in ("POST", "PUT") and not known:
            return self._say({"error": "no right to write"}, 403)
        if parts[0] != "api":
            if rest[:2] == ["info", "lfs"]:
                return self._batch(json.loads(body))
            return self._file(repository, rest[1], "/".join(rest[2:]))
        return self._of_repository(name, repository, rest, body)

    def _of_repository(self, name: str, repository: Repository, rest: list[str], body: bytes) -> None:
        what, revision = (rest[0] if rest else "revision"), (rest[1] if len(rest) > 1 else "main")
        if what == "branch":
            if revision in repository.branches:
                return self._say({"error": "exists"}, 409)
            repository.branches[revision] = list(repository.branches["main"])
            return self._say({})
        found = repository.find(revision)
        if found is None:
            return self._say({"error": "no such revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if what == "revision":
            siblings = [{"rfilename": path} for path in found[2]]
            return self._say({"id": name, "sha": found[0], "private": repository.private, "siblings": siblings})
        if what == "tree":
            return self._say([_entry(path, raw) for path, raw in sorted(found[2].items())])
        if what == "preupload":
            return self._preupload(json.loads(body), found[2])
        assert what == "commit"
        return self._commit(name, repository, revision, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any], known: bool) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not known:
            return self._say({"error": "Invalid username or password."}, 401)
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            return self._say({"error": "You already created this model repo", "url": url}, 409)
        self.server.add(name, private=asked.get("visibility") == "private")
        return self._say({"url": url, "id": name})

    def _preupload(self, asked: dict[str, Any], there: dict[str, bytes]) -> None:
        answer = []
        for file in asked["files"]:
            large = file["path"].endswith(".safetensors")
            raw = there.get(file["path"])
            oid = {} if raw is None else {"oid": hashlib.sha256(raw).hexdigest() if large else git_oid(raw)}
            mode = "lfs" if large else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        self._say({"files": answer})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            verify = {"href": f"{self.server.url}/lfs/verify/{one['oid']}"}
            upload = {"href": f"{self.server.url}/lfs/put/{one['oid']}"}
            actions = {} if one["oid"] in self.server.large else {"actions": {"upload": upload, "verify": verify}}
            objects.append({"oid": one["oid"], "size": one["size"], **actions})
        self._say({"transfer": "basic", "objects": objects})

    def _take_large(self, path: str, body: bytes) -> None:
        oid = path.rpartition("/")[2]
        if "/put/" in path:
            assert hashlib.sha256(body).hexdigest() == oid
            self.server.large[oid] = body
        self._say({}, 200 if oid in self.server.large else 404)

    def _commit(self, name: str, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> None:
        header = lines[0]["value"]
        head, _, files = repository.branches[branch][-1]
        if header.get("parentCommit") not in (None, head):
            return self._say({"error": "the branch has moved"}, 412)
        files = dict(files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        oid = repository.commit(branch, header["summary"], files)
        return self._say({"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    def _file(self, repository: Repository, revision: str, path: str) -> None:
        found = repository.find(revision)
        if found is None or path not in found[2]:
            return self._say({"error": "no such file"}, 404, {"X-Error-Code": "EntryNotFound"})
        raw = found[2][path]
        self._send(raw, 200, {"ETag": f'"{git_oid(raw)}"', "X-Repo-Commit": found[0]})

    def _say(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, raw: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)


def _entry(path: str, raw: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(raw), "oid": git_oid(raw)}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
    return entry
