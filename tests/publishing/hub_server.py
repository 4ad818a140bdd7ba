"""A small Hub: the endpoints that `huggingface_hub` uses to publish and to download, over HTTP on 127.0.0.1.

Files up to 1,000 bytes of text go into the commit itself, others by LFS; nothing is visible before its commit. Requests can be
made to break in the middle of their body or of the answer, or be answered with a status.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_testTokenOfTheOwner01"
LFS = (".safetensors", ".png")


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _lfs(content: bytes) -> dict:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 134}


class Hub:
    """The state of the server, and what breaks.

    Args:
        breaks: given the line of a request, how it ends: `None` as it should, `"middle"` or `"answer"` with the connection
            broken, or an HTTP status.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> path -> content
        self.heads: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.breaks: Callable[[str], Any] = lambda line: None
        self.lock = threading.Lock()
        self.url = ""

    def files(self, repo: str) -> dict[str, bytes]:
        """What a reader of `repo` gets now."""
        return self.repos[repo][self.heads[repo]]

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        content = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in sorted(files.items())})
        oid = hashlib.sha1(f"{repo}{len(self.repos.get(repo, {}))}{content}".encode()).hexdigest()
        self.repos.setdefault(repo, {})[oid] = files
        self.heads[repo] = oid
        return oid


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def _serve(self):
        self.close_connection = True
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {self.path}")
            fate = self.hub.breaks(self.hub.requests[-1])
        length = int(self.headers.get("Content-Length") or 0)
        if fate == "middle":
            self.rfile.read(length // 2)
            return
        body = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
        if isinstance(fate, int):
            return self._answer({"error": "made to fail"}, fate)
        with self.hub.lock:
            answer = self._route(self.path.split("?")[0], body)
        self.cut = fate == "answer"
        answer()

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Any, status: int = 200, code: str | None = None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self._write(data)

    def _write(self, data: bytes):
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if getattr(self, "cut", False) else data)

    def _route(self, path: str, body: bytes) -> Callable[[], None]:
        """Do what is asked for; returns what sends the answer."""
        words = path.strip("/").split("/")
        owner = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path.startswith("/lfs/"):  # signed addresses, no token
            good = hashlib.sha256(body).hexdigest() == words[1]
            if good:
                self.hub.blobs[words[1]] = body
            return lambda: self._answer({}, 200 if good else 400)
        if self.command == "POST" and path != "/api/validate-yaml" and not owner:
            return lambda: self._answer({"error": "You don't have the rights to do this"}, 401)
        if path == "/api/validate-yaml":
            return lambda: self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if words[:2] == ["api", "models"]:
            return self._model("/".join(words[2:4]), words[4:], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        return self._resolve("/".join(words[:2]), words[3], "/".join(words[4:]))

    def _create(self, asked: dict):
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.repos:
            return lambda: self._answer({**answer, "error": "You already created this model repo"}, 409)
        self.hub.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        return lambda: self._answer(answer)

    def _model(self, repo: str, rest: list[str], body: bytes):
        if repo not in self.hub.repos:
            return lambda: self._answer({"error": "Repository not found"}, 404, "RepoNotFound")
        files = self.hub.files(repo)
        if rest[:1] == ["preupload"]:
            return lambda: self._answer({"files": [self._mode(file, files) for file in json.loads(body)["files"]]})
        if rest[:1] == ["commit"]:
            return self._commit(repo, dict(files), [json.loads(line) for line in body.splitlines()])
        if rest[:1] == ["tree"]:
            found = self.hub.repos[repo].get(rest[1], files)
            entries = [{"type": "file", "path": n, "size": len(d), "oid": git_oid(d)} for n, d in found.items()]
            return lambda: self._answer(entries)
        card = files.get("README.md", b"").decode()
        data = yaml.safe_load(card.split("---\n")[1]) if card.startswith("---\n") else None
        siblings = [{"rfilename": name} for name in files]
        for item in siblings if "blobs=" in self.path else ():
            if item["rfilename"].endswith(LFS):
                content = files[item["rfilename"]]
                item |= {"size": len(content), "lfs": _lfs(content)}
        info = {"id": repo, "modelId": repo, "sha": self.hub.heads[repo], "siblings": siblings, "tags": []}
        return lambda: self._answer(info | {"cardData": data})

    def _mode(self, file: dict, files: dict[str, bytes]) -> dict:
        sample = base64.b64decode(file["sample"])
        lfs = file["path"].endswith(LFS) or b"\0" in sample
        there = files.get(file["path"])
        oid = None if there is None else hashlib.sha256(there).hexdigest() if lfs else git_oid(there)
        return {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def _batch(self, asked: dict):
        objects = []
        for each in asked["objects"]:
            href = f"{self.hub.url}/lfs/{each['oid']}"
            actions = {} if each["oid"] in self.hub.blobs else {"actions": {"upload": {"href": href, "header": {}}}}
            objects.append({**each, **actions})
        return lambda: self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, files: dict[str, bytes], lines: list[dict]):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    return lambda: self._answer({"error": "LFS pointer pointed to a file that does not exist"}, 400)
                files[value["path"]] = self.hub.blobs[value["oid"]]
        oid = self.hub.commit(repo, files)
        return lambda: self._answer({"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid})

    def _resolve(self, repo: str, revision: str, name: str):
        commits = self.hub.repos.get(repo, {})
        oid = revision if revision in commits else self.hub.heads.get(repo)
        data = commits.get(oid, {}).get(name)
        if data is None:
            return lambda: self._answer({"error": "Entry not found"}, 404, "EntryNotFound")

        def send():
            self.send_response(200)
            headers = {
                "X-Repo-Commit": oid,
                "ETag": f'"{git_oid(data)}"',
                "Content-Length": len(data),
                "Connection": "close",
            }
            for header, value in headers.items():
                self.send_header(header, str(value))
            self.end_headers()
            self._write(data)

        return send


@contextmanager
def hub():
    """A running [`Hub`]; its `url` is the endpoint."""
    state = Hub()
    handler = type("Handler", (_Handler,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that went away
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
