"""The machine's Docker engine behind TLS, which asks for the client's certificate: as `dockerd --tlsverify` does.

A program of its own and no asyncio, whose TLS closes both directions at once: an engine's streams end one at a time.
"""

import datetime
import ipaddress
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

ENGINE = "/var/run/docker.sock"


def write_certificates(folder: Path) -> None:
    """ca.pem, cert.pem and key.pem, as DOCKER_CERT_PATH holds them; one certificate serves both sides here."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=batch-runner-test")
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.add_extension(here, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    for part in ("ca", "cert"):
        (folder / f"{part}.pem").write_bytes(certificate)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(secret)


@contextmanager
def tls_front(folder: Path) -> Iterator[str]:
    """HOST:PORT. `folder` gets the certificates."""
    write_certificates(folder)
    command = [sys.executable, "-m", "tests.contract.tls_front", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield f"127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def _serve(folder: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_one, args=(context, client), daemon=True).start()


def _one(context: ssl.SSLContext, client: socket.socket) -> None:
    with (
        suppress(OSError),
        context.wrap_socket(client, server_side=True) as outer,
        socket.socket(socket.AF_UNIX) as inner,
    ):
        inner.connect(ENGINE)
        _carry(outer, inner)


def _carry(outer: ssl.SSLSocket, inner: socket.socket) -> None:
    """Both ways until the engine has said all."""
    reading = [outer, inner]
    while True:
        ready: list[socket.socket] = (
            [outer] if outer in reading and outer.pending() else select.select(reading, [], [])[0]
        )
        if outer in ready:
            data = outer.recv(1 << 16)
            if data:
                inner.sendall(data)
            else:
                reading.remove(outer)
                inner.shutdown(socket.SHUT_WR)
        if inner in ready:
            data = inner.recv(1 << 16)
            if not data:
                return
            outer.sendall(data)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
