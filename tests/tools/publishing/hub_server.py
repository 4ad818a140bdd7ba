"""A small Hub: the endpoints that `huggingface_hub` uses to publish and to download, over HTTP on 127.0.0.1.

Weights go by LFS, other files into the commit itself; nothing is visible before its commit.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

TOKEN = "hf_testTokenOfTheOwner01"


class Hub:
    """The state of the server.

    `breaks` receives a request's line and returns how the request ends: `None` if it succeeds, an HTTP status if it is
    refused, and "before" or "after" if the connection breaks before or after the request was carried out.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> path -> content
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.breaks: Callable[[str], str | int | None] = lambda line: None
        self.url = ""

    def files(self, repo: str) -> dict[str, bytes]:
        """The files of the newest commit of `repo`, which a reader downloads."""
        return list(self.repos[repo].values())[-1]

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        commits = self.repos.setdefault(repo, {})
        oid = hashlib.sha1(f"{repo}{len(commits)}".encode()).hexdigest()
        commits[oid] = files
        return oid

    def route(self, path: str, is_owner: bool, body: bytes) -> tuple[object, int, dict]:
        """Content, status and headers of the answer."""
        words = path.strip("/").split("/")
        if words[0] == "lfs":  # the addresses of LFS are signed, so the client sends no token
            if hashlib.sha256(body).hexdigest() != words[1]:
                return {}, 400, {}
            self.blobs[words[1]] = body
            return {}, 200, {}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200, {}
        if not is_owner:
            return {"error": "You don't have the rights to do this"}, 401, {}
        if path == "/api/repos/create":
            repo = f"{json.loads(body).get('organization') or 'me'}/{json.loads(body)['name']}"
            if repo not in self.repos:
                self.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
            return {"url": f"{self.url}/{repo}"}, 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for blob in objects:
                if blob["oid"] not in self.blobs:
                    blob["actions"] = {"upload": {"href": f"{self.url}/lfs/{blob['oid']}", "header": {}}}
            return {"transfer": "basic", "objects": objects}, 200, {}
        repo = "/".join(words[2:4] if words[:2] == ["api", "models"] else words[:2])
        commits = self.repos.get(repo, {})
        if words[0] != "api":  # OWNER/NAME/resolve/REVISION/FILE
            oid = words[3] if words[3] in commits else list(commits)[-1]
            data = commits[oid].get(words[4])
            if data is None:
                return {}, 404, {"X-Error-Code": "EntryNotFound"}
            return data, 200, {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if words[4:5] == ["preupload"]:
            uploads = []
            for file in json.loads(body)["files"]:
                mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
                uploads.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
            return {"files": uploads}, 200, {}
        if words[4:5] == ["commit"]:
            files = dict(self.files(repo))
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
            oid = self.commit(repo, files)
            return {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}, 200, {}
        if words[4:5] == ["tree"]:
            files = self.files(repo).items()
            return [{"type": "file", "path": path, "size": len(data), "oid": ""} for path, data in files], 200, {}
        siblings = [{"rfilename": name} for name in self.files(repo)]
        return {"id": repo, "sha": list(commits)[-1], "siblings": siblings, "tags": []}, 200, {}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def _serve(self):
        line = f"{self.command} {self.path}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(line)
        fate = self.hub.breaks(line)
        if isinstance(fate, int):
            return self.send_error(fate)
        if fate == "before":
            return
        is_owner = self.command in ("GET", "HEAD") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        content, status, headers = self.hub.route(self.path.split("?")[0], is_owner, body)
        if fate == "after":
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data if self.command != "HEAD" else b"")

    do_GET = do_HEAD = do_POST = do_PUT = _serve


@contextmanager
def hub():
    """A running [`Hub`]; its `url` is the endpoint."""
    state = Hub()
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
