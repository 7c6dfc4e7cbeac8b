"""Owners, control groups and backend names: what can be said without a sandbox."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from tools.environments.cgroup import Bases, find_bases
from tools.environments.owner import current_owner, decode, encode, is_dead
from tools.environments.processes import is_marked
from tools.environments.table import BACKENDS, load_backend, resolve_backend
from tools.errors import UsageProblem


def test_an_owner_is_dead_when_its_process_is_gone_or_another() -> None:
    owner = current_owner("run")
    assert decode(encode(owner)) == owner
    assert decode("{}") is None
    assert is_dead(owner) is False
    assert is_dead(msgspec.structs.replace(owner, start_time=owner.start_time + 1)) is True
    assert is_dead(msgspec.structs.replace(owner, boot_id="another")) is None
    assert is_dead(msgspec.structs.replace(owner, pid_namespace="pid:[1]")) is None
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
        assert is_dead(msgspec.structs.replace(owner, pid=gone.pid)) is True


def test_a_mark_is_seen_in_a_living_process() -> None:
    with subprocess.Popen(["sleep", "30"], env={"BATCH_CALL": "token.3.", "PATH": "/usr/bin:/bin"}) as process:
        while is_marked(process.pid, "token.") is None:
            pass
        assert is_marked(process.pid, "token.3.") is True
        assert is_marked(process.pid, "token.33.") is False
        process.kill()
        process.wait()
        assert is_marked(process.pid, "token.3.") is False


V1 = """\
31 26 0:27 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct
33 31 0:29 /docker/x /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 31 0:30 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
35 31 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "31 26 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("mounts", "membership", "bases"),
    [
        (
            V1,
            "4:memory:/docker/x/job\n3:pids:/\n2:cpu,cpuacct:/a\n0::/\n",
            Bases(
                1,
                (Path("/sys/fs/cgroup/memory/job"), Path("/sys/fs/cgroup/cpu,cpuacct/a"), Path("/sys/fs/cgroup/pids")),
            ),
        ),
        (V1, "4:memory:/docker/x\n0::/\n", Bases(2, (Path("/sys/fs/cgroup/unified"),))),
        (V2, "0::/user.slice/app.scope\n", Bases(2, (Path("/sys/fs/cgroup/user.slice/app.scope"),))),
        ("", "0::/\n", None),
    ],
)
def test_control_groups_are_found(mounts: str, membership: str, bases: Bases | None) -> None:
    assert find_bases(mounts, membership) == bases


def test_every_backend_of_the_table_is_one() -> None:
    for name in BACKENDS:
        assert load_backend(name).name == name
    with pytest.raises(UsageProblem, match="bubblewrap"):
        load_backend("bublewrap")
    with pytest.raises(UsageProblem, match=r"bubblewrap or .*docker or local or .*podman"):
        load_backend("zzz")


async def test_auto_takes_what_isolates_and_never_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await resolve_backend("auto", wants_image=False) == "bubblewrap"
    assert await resolve_backend("local", wants_image=False) == "local"
    for name in ("local", "bubblewrap"):
        with pytest.raises(UsageProblem, match="takes no images"):
            await resolve_backend(name, wants_image=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UsageProblem, match=r"bubblewrap is not installed.*docker.*container_backend=local"):
        await resolve_backend("auto", wants_image=False)
    with pytest.raises(UsageProblem, match=r"^no sandbox can be opened here: docker"):
        await resolve_backend("auto", wants_image=True)
    with pytest.raises(UsageProblem, match="container_backend bubblewrap: bubblewrap is not installed"):
        await resolve_backend("bubblewrap", wants_image=False)
