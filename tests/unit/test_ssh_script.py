"""What a host is told and what it says, without a host."""

import pytest

from tests.contract.environments import make_spec
from tools.environments.base import Limits
from tools.environments.ssh_connection import Target, parse_target
from tools.environments.ssh_script import HostFacts, Record, confine, group_folders, listed, read_facts, refused
from tools.errors import UsageProblem

VERSION_2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
SAYS = "/usr/bin:/bin\n/tmp/\nuser\n1000\n/usr/bin/taskset\n0-2,5\n" + VERSION_2 + "\n0::/user.slice/session-3.scope\n"


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("user@host:2222", Target("host", 2222, "user")),
        (" host ", Target("host")),
        ("10.0.0.1:22", Target("10.0.0.1", 22)),
        ("me@[::1]:22", Target("::1", 22, "me")),
        ("first.last@[fe80::1%eth0]", Target("fe80::1%eth0", 0, "first.last")),
    ],
)
def test_a_host_is_read_as_it_is_written(text: str, target: Target) -> None:
    assert parse_target(text) == target
    assert parse_target(str(target)) == target


@pytest.mark.parametrize("text", ["", "a b", "user@", "host:", "host:x", "host:99999", "::1", "u@h@i", "-oProxy=x y"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(UsageProblem, match="ssh_hosts"):
        parse_target(text)


def facts() -> HostFacts:
    found = read_facts(SAYS)
    assert found
    return found


def test_what_a_host_says() -> None:
    found = facts()
    assert (found.path, found.base, found.user) == ("/usr/bin:/bin", "/tmp", "user")
    assert (found.is_root, found.has_taskset, found.cpus) == (False, True, (0, 1, 2, 5))
    assert group_folders(found, "ab") == (
        ("/sys/fs/cgroup/user.slice/session-3.scope/batch-ab",),
        ("/sys/fs/cgroup/batch-ab",),
    )


def test_a_host_that_is_no_linux() -> None:
    assert read_facts("/usr/bin\n/tmp\nuser\n1000\n\n\n\n") is None
    assert read_facts("") is None


def test_directories_that_are_listed() -> None:
    record = Record(make_spec().owner, 5.0, "0123456789ab", (("/g/batch",),))
    text = (
        '0123456789ab||{"owner":{"run_id":"a|b","boot_id":"","pid_namespace":"","pid":1,"start_time":2},'
        '"deadline":5.0,"token":"0123456789ab","groups":[["/g/batch"]]}\n'
        'aaaaaaaaaaaa||{"owner":{"run_id":"a","boot_id":"","pid_namespace":"","pid":1,"start_time":2},'
        '"deadline":5.0,"token":"0123456789ab","groups":[]}\n'
        "bbbbbbbbbbbb|old|\n"
        "../../../etc|old|\n"
        "runs 0123456789ab.0.PATH=/bin\n"
    )
    first, other, bare = listed(text)
    assert first.record
    assert (first.record.owner.run_id, first.record.groups, first.runs) == ("a|b", record.groups, True)
    assert (other.record, other.runs, other.is_old) == (None, False, False), "a record that speaks of another"
    assert (bare.record, bare.is_old) == (None, True)


def test_limits_that_a_host_without_control_groups_keeps_or_not() -> None:
    found = facts()
    usual = Limits(cpus=2, memory_mb=100, pids=64)
    assert refused(found, usual) == ""
    assert confine((), usual, (0, 5)) == (
        "taskset -cp 0,5 $$ >/dev/null && ulimit -d 102400 && { ulimit -u 64 || ulimit -p 64; } 2>/dev/null"
    )
    assert "0.5 processors" in refused(found, Limits(cpus=0.5))
    assert refused(found, Limits(cpus=4.5)) == "", "more than it has"
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    assert "taskset" in refused(HostFacts(**{**fields, "has_taskset": False}), usual)
    assert "root" in refused(HostFacts(**{**fields, "is_root": True}), usual)
