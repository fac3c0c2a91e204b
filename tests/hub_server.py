"""A server that speaks as much of the Hugging Face Hub's API as its own client needs, in a thread of the test.

with HubServer() as hub, hub.client(tmp_path, monkeypatch): # huggingface_hub and transformers now talk to it
    hub.drop.add("commit")                                  # the next commit ends without an answer
    ...
    hub.files("org/name")                                   # {path: bytes} of the last commit

For other processes: `hub.environment(folder)`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "t" * 34


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> the files that it holds."""
    revisions: dict[str, str] = field(default_factory=dict)
    """Branches and tags -> commit."""

    def commit_of(self, revision: str) -> str | None:
        return self.revisions.get(revision) or (revision if revision in self.commits else None)

    def commit(self, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.revisions["main"] = oid
        return oid


class HubServer(ThreadingHTTPServer):
    """Repositories of models, private ones and writing for the holder of TOKEN only, large files by LFS."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        """What was uploaded by LFS, by SHA-256: also what no commit names yet."""
        self.drop: set[str] = set()
        """`commit`, `upload`: the next request of this kind ends without an answer."""
        self.asked: list[str] = []
        """Method and path of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        return self.repos[repo].commits[self.repos[repo].revisions["main"]]

    def add(self, repo: str, folder: Path) -> None:
        """A public repository with the files of a folder."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos[repo] = Repo(private=False)
        self.repos[repo].commit(files)

    def count(self, what: str) -> int:
        """Requests whose method and path match."""
        return sum(bool(re.search(what, one)) for one in self.asked)

    def environment(self, folder: Path, token: str = TOKEN) -> dict[str, str]:
        """Variables under which another process talks to this server alone, with a cache of its own."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return variables | {"HF_TOKEN": token, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def client(self, folder: Path, monkeypatch: Any, token: str = TOKEN) -> None:
        """The same for this process, whose client has read its variables already."""
        from huggingface_hub import constants
        from transformers import dynamic_module_utils

        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
        monkeypatch.setenv("HF_TOKEN", token)


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    # -- which part of the API ---------------------------------------------------------------------------------------

    def _route(self, method: str) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        self.query = parse_qs(address.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{method} {path}")
        for pattern, answer in _ROUTES:
            if matched := re.fullmatch(pattern, f"{method} {path}"):
                return answer(self, **matched.groupdict())
        return self._json(404, {"error": f"no such address: {method} {path}"})

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, repo: str, revision: str = "main", *, writing: bool = False) -> tuple[Repo, str] | None:
        """The repository and the commit, or None after an answer that says what is missing."""
        found = self.server.repos.get(repo)
        if writing and not self._known:
            self._json(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
        elif found is None or (found.private and not self._known):
            self._json(404 if self._known else 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif not writing and found.commit_of(revision) is None and not (revision == "main" and not found.commits):
            self._json(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            return found, found.commit_of(revision) or ""
        return None

    # -- writing -----------------------------------------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self.body)
        if not self._known:
            return self._json(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
        if asked["organization"] == "others":
            return self._json(403, {"error": "You don't have the rights to create a model under this namespace"})
        repo = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.server.url}/{repo}", "name": repo}
        if repo in self.server.repos:
            return self._json(409, answer | {"error": "You already created this model repo"})
        self.server.repos[repo] = Repo(private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return self._json(200, answer)

    def check_card(self) -> None:
        """What the real one looks at that went wrong for somebody: the front matter, and base_model in it."""
        matched = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], flags=re.DOTALL)
        values = yaml.safe_load(matched[1]) if matched else {}
        base = values.get("base_model")
        if base is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            return self._json(400, {"errors": [{"message": f'"base_model" {base} is not a model id'}], "warnings": []})
        return self._json(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        if (found := self._repo(repo, writing=True)) is None:
            return
        there = found[0].commits.get(found[0].revisions.get(revision, ""), {})
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": _oid(file["path"], there[file["path"]]) if file["path"] in there else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json(200, {"files": answers})

    def batch(self, repo: str) -> None:
        if self._repo(repo, writing=True) is None:
            return
        objects = []
        for one in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.server.url}/upload/{one['oid']}", "header": {}}
            verify = {"href": f"{self.server.url}/verify", "header": {}}
            actions = {} if one["oid"] in self.server.large else {"actions": {"upload": upload, "verify": verify}}
            objects.append(one | actions)
        self._json(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if self._dropped("upload"):
            return
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._json(422, {"error": "the content is not what was announced"})
        self.server.large[oid] = self.body
        self._json(200, {})

    def verify(self) -> None:
        asked = json.loads(self.body)
        good = len(self.server.large.get(asked["oid"], b"")) == asked["size"]
        self._json(200 if good else 404, {})

    def commit(self, repo: str, revision: str) -> None:
        if (found := self._repo(repo, writing=True)) is None or self._dropped("commit"):
            return
        files = dict(found[0].commits.get(found[0].revisions.get(revision, ""), {}))
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.large:
                    return self._json(400, {"error": f"LFS pointer to nothing: {value['path']}"})
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = found[0].commit(files)
        self._json(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{repo}/commit/{oid}"})

    def _dropped(self, what: str) -> bool:
        """Ends the connection without an answer, once, where the test has asked for it."""
        if what not in self.server.drop:
            return False
        self.server.drop.discard(what)
        self.close_connection = True
        return True

    # -- reading -----------------------------------------------------------------------------------------------------

    def info(self, repo: str, revision: str | None) -> None:
        if (found := self._repo(repo, revision or "main")) is None:
            return
        names = sorted(found[0].commits.get(found[1], {}))
        siblings = [{"rfilename": name} for name in names]
        private = found[0].private
        self._json(200, {"id": repo, "sha": found[1] or "0" * 40, "private": private, "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        if (found := self._repo(repo, revision)) is None:
            return
        entries = []
        for name, content in sorted(found[0].commits[found[1]].items()):
            oid = _oid(name, content)
            lfs = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 128}} if _is_large(name) else {}
            entries.append({"type": "file", "path": name, "size": len(content), "oid": oid} | lfs)
        self._json(200, entries)

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if (found := self._repo(repo, revision)) is None:
            return
        repository, commit = found
        if name not in repository.commits[commit]:
            return self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        content = repository.commits[commit][name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(name, content)}"'}
        if not _is_large(name):
            return self._send(200, content, headers)
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": headers["ETag"]}
        oid = _oid(name, content)
        self.server.large[oid] = content
        # another host, as the real one's store is: the client follows redirects within the hub's own
        place = f"http://localhost:{self.server.server_port}/large/{oid}"
        return self._send(302, b"", headers | linked | {"Location": place})

    def large(self, oid: str) -> None:
        self._send(200, self.server.large[oid], {"ETag": f'"{oid}"'})

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.check_card),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /upload/(?P<oid>\w+)", _Handler.upload),
    (r"POST /verify", _Handler.verify),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>.+)", _Handler.commit),
    (rf"GET /api/models/{_REPO}(?:/revision/(?P<revision>.+))?", _Handler.info),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)(?:/.*)?", _Handler.tree),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
    (r"(?:GET|HEAD) /large/(?P<oid>\w+)", _Handler.large),
]


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".png"))


def _oid(name: str, content: bytes) -> str:
    """SHA-256 of a large file, git's name for the content of a small one."""
    if _is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
