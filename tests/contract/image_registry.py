"""A registry on loopback that serves one image of the Docker engine, in the registry's own protocol over HTTP.

Format: https://distribution.github.io/distribution/spec/api/ and its image manifest, version 2, schema 2.
"""

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tests.service import serving

_TYPE = "application/vnd.docker."


def saved(image: str, path: Path) -> Path:
    """The image as an archive of `docker save`."""
    subprocess.run(["docker", "save", "-o", str(path), image], check=True)
    return path


def foreign_shell(place: Path) -> None:
    """A program for another kind of processor."""
    program = bytearray(Path("/bin/sh").read_bytes())
    program[18:20] = b"\xb7\x00"  # e_machine of an ELF file: EM_AARCH64
    place.unlink(missing_ok=True)
    place.write_bytes(program)
    place.chmod(0o755)


def with_architecture(name: str, archive: Path, other: Path) -> Path:
    """The same archive, its image said to be for that kind of machine."""
    with tarfile.open(archive) as tar, tarfile.open(other, "w") as out:
        contents = {member.name: (member, tar.extractfile(member)) for member in tar}
        listed = contents["manifest.json"][1]
        assert listed is not None
        described = json.load(listed)[0]["Config"]
        for path, (member, file) in contents.items():
            data = file.read() if file and path != "manifest.json" else b""
            if path == described:
                data = json.dumps({**json.loads(data), "architecture": name}).encode()
            if path == "manifest.json":
                listed.seek(0)
                data = listed.read()
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return other


def _blob(kind: str, data: bytes) -> tuple[dict[str, object], bytes]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return {"mediaType": _TYPE + kind, "size": len(data), "digest": digest}, data


def _members(archive: Path) -> tuple[bytes, dict[str, bytes]]:
    """The manifest and every blob by its digest."""
    with tarfile.open(archive) as tar:

        def content(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        (listed,) = json.loads(content("manifest.json"))
        config = _blob("container.image.v1+json", content(listed["Config"]))
        layers = [
            _blob("image.rootfs.diff.tar.gzip", gzip.compress(content(name), compresslevel=1))
            for name in listed["Layers"]
        ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}distribution.manifest.v2+json",
        "config": config[0],
        "layers": [entry for entry, _ in layers],
    }
    return json.dumps(manifest).encode(), {str(entry["digest"]): data for entry, data in (config, *layers)}


@asynccontextmanager
async def registry(archive: Path, *, login: str = "", asked: list[str] | None = None) -> AsyncIterator[str]:
    """HOST:PORT; the image is `box`, with any tag but `none`. It serves nobody but `login`, a USER:PASSWORD, if given;
    `asked` gets the tags and digests of the manifests asked for."""
    manifest, blobs = _members(archive)
    expected = f"Basic {base64.b64encode(login.encode()).decode()}" if login else None

    async def answer(request: web.Request) -> web.Response:
        if expected and request.headers.get("Authorization") != expected:
            refusal = {"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}
            return web.json_response(refusal, status=401, headers={"WWW-Authenticate": 'Basic realm="here"'})
        kind, _, name = request.path.removeprefix("/v2/").removeprefix("box/").partition("/")
        if kind == "manifests" and asked is not None:
            asked.append(name)
        if kind == "manifests" and name != "none":
            return web.Response(body=manifest, content_type=f"{_TYPE}distribution.manifest.v2+json")
        if kind == "blobs" and name in blobs:
            return web.Response(body=blobs[name], content_type="application/octet-stream")
        if not kind:
            return web.json_response({})
        return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}, status=404)

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    async with serving(app) as port:
        yield f"127.0.0.1:{port}"
