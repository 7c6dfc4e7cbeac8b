"""What every environment does: one suite over all backends, each sentence of the contract a test."""

import asyncio
import random
import re
import resource
import time

import pytest

from tests.contract.environments import bytes_of, eventually, open_sandbox, printed
from tools.environments import shell
from tools.environments.base import Environment
from tools.errors import EnvironmentLost, SetupFailed, ToolError


def unique() -> str:
    """A number of seconds to sleep that no other process of this machine sleeps."""
    return f"{random.randrange(10**4, 10**6)}.5"


async def living(environment: Environment, *seconds: str) -> int:
    """Processes that the sandbox sees with one of these as an argument of its own; not the one that looks for them."""
    patterns = " ".join(f"-e '[{number[0]}]{number[1:]}'" for number in seconds)
    return int(await printed(environment, f"grep -slzx {patterns} /proc/[0-9]*/cmdline | wc -l"))


# commands


async def test_exit_code_and_joined_stderr(sandbox: Environment) -> None:
    result = await sandbox.run("echo out; echo err >&2; echo out again; exit 3", timeout=20)
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\nout again\n", 3, False)
    assert not result.background


@pytest.mark.parametrize(
    ("command", "code"), [("kill -TERM $$", 143), ("kill -9 $$", 137), ("nonsense_here", 127), ("if", 2), ("false", 1)]
)
async def test_exit_codes(sandbox: Environment, command: str, code: int) -> None:
    assert (await sandbox.run(command, timeout=20)).exit_code == code
    assert await printed(sandbox, "echo still") == "still\n"


async def test_directory_and_exported_variables_persist(sandbox: Environment) -> None:
    await printed(sandbox, "mkdir -p 'a b/c'; cd 'a b'; cd c; export KEPT='x\n\"y\" $HOME'; PLAIN=1; unset PAGER")
    shown = await printed(sandbox, 'pwd; echo "$KEPT"; echo "[$PLAIN][$PAGER]"; cd - >/dev/null; pwd')
    lines = shown.splitlines()
    assert lines[0].endswith("a b/c")
    assert lines[1:4] == ["x", '"y" $HOME', "[][]"]
    assert lines[4].endswith("a b")


async def test_state_persists_through_exit_and_a_trap_of_the_command(sandbox: Environment) -> None:
    assert (await sandbox.run("cd /usr; export A=1; exit 5", timeout=20)).exit_code == 5
    assert await printed(sandbox, "pwd; echo $A") == "/usr\n1\n"
    assert await printed(sandbox, "trap 'echo bye' EXIT; cd /; export A=2") == "bye\n"
    assert await printed(sandbox, "pwd; echo $A") == "/\n2\n"
    await sandbox.run("set -e; set -C; set -u; cd /usr/bin; false", timeout=20)
    assert await printed(sandbox, "pwd") == "/usr/bin\n"


async def test_exec_and_a_killed_shell_keep_the_state_before(sandbox: Environment) -> None:
    await printed(sandbox, "cd /usr")
    assert await printed(sandbox, "cd /; exec echo replaced") == "replaced\n"
    assert (await sandbox.run("cd /; kill -9 $$", timeout=20)).exit_code == 137
    assert await printed(sandbox, "pwd") == "/usr\n"


@pytest.mark.parametrize(
    "command",
    [
        "export LC_ALL=xx_XX.UTF-8",
        "export UID EUID PPID SHELLOPTS BASHOPTS",
        "readonly LC_ALL HOME; export LC_ALL HOME",
    ],
)
async def test_what_the_shell_says_of_kept_variables_is_no_output(sandbox: Environment, command: str) -> None:
    await sandbox.run(command, timeout=20)
    for directory in ("/usr", "/"):
        assert await printed(sandbox, f"echo out; echo err >&2; cd {directory}") == "out\nerr\n"
        assert await printed(sandbox, "pwd") == f"{directory}\n"
    process = await sandbox.start("echo out; echo err >&2")
    assert await process.wait(20) == 0
    assert process.output() == "out\nerr\n"


async def test_a_function_called_as_a_command_of_ours_loses_nothing(sandbox: Environment) -> None:
    await printed(sandbox, "command() { echo mine; }; export KEPT=1; cd /usr")
    assert await printed(sandbox, 'echo "$KEPT $PAGER"; pwd') == "1 cat\n/usr\n"


async def test_of_a_forgotten_quote_only_the_command_is_told(sandbox: Environment) -> None:
    result = await sandbox.run('echo "a', timeout=20)
    assert result.exit_code
    assert "/dev/null" not in result.output
    assert await printed(sandbox, "echo b") == "b\n"


async def test_a_deleted_directory_falls_back_to_home(sandbox: Environment) -> None:
    await printed(sandbox, "mkdir gone; cd gone; rmdir ../gone")
    assert await printed(sandbox, '[ "$PWD" = "$HOME" ] && echo home') == "home\n"


async def test_cwd_of_one_command_alone(sandbox: Environment) -> None:
    before = await printed(sandbox, "pwd")
    result = await sandbox.run("pwd; cd /; export B=2", timeout=20, cwd="/usr")
    assert result.output == "/usr\n"
    assert await printed(sandbox, "pwd; echo $B") == before + "2\n"
    missing = await sandbox.run("echo ran", timeout=20, cwd="/no/such")
    assert (missing.exit_code, missing.output) == (126, "cd: /no/such: no such directory\n")


async def test_stdin_is_empty(sandbox: Environment) -> None:
    assert await printed(sandbox, 'read x; echo "[$x]"; cat; wc -c') == "[]\n0\n"


async def test_quotes_newlines_and_substitutions(sandbox: Environment) -> None:
    command = (
        "echo 'a\"b' \"c'd\" $(echo 'x y') `echo z`\ncat <<'END'\n$HOME \\ 'q'\nEND\nprintf '%s|' \"$@\" # no ends"
    )
    assert await printed(sandbox, command) == "a\"b c'd x y z\n$HOME \\ 'q'\n|"


async def test_set_x_traces_the_command_alone(sandbox: Environment) -> None:
    assert re.fullmatch(r"\+* echo a\na\n", await printed(sandbox, "set -x; echo a"))


async def test_children_see_an_allow_listed_environment(sandbox: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {line.split("=")[0] for line in (await printed(sandbox, "env")).splitlines()}
    allowed = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "HOME", "TMPDIR", "USER", "SHELL", "PAGER"}
    allowed |= {"GIT_PAGER", "GIT_TERMINAL_PROMPT", "DEBIAN_FRONTEND", "BATCH_CALL"}
    assert names <= allowed | {"HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"}
    assert "cat 0 noninteractive" in await printed(sandbox, "echo $PAGER $GIT_TERMINAL_PROMPT $DEBIAN_FRONTEND")


async def test_the_shell_is_named_and_counts_characters(sandbox: Environment) -> None:
    command = """[ "${BASH-}" ] || { echo none; exit; }; x=é; "$SHELL" -c 'x=é; echo "${#x}"'; echo "${#x}" """
    assert await printed(sandbox, command) in ("none\n", "1\n1\n")


async def test_the_mark_of_a_call_is_not_kept(sandbox: Environment) -> None:
    first, second = [await printed(sandbox, "env | grep BATCH_CALL") for _ in range(2)]
    assert first != second


async def test_variables_of_the_row(backend_name: str) -> None:
    async with open_sandbox(backend_name, variables={"ROW": "it's\n$HOME", "PAGER": "less"}) as environment:
        assert await printed(environment, 'printf %s "$ROW|$PAGER"') == "it's\n$HOME|less"
    with pytest.raises(SetupFailed, match="A-B"):
        async with open_sandbox(backend_name, variables={"A-B": "x"}):
            pass
    with pytest.raises(SetupFailed, match="environment variable UID: the sandbox's shell holds it itself"):
        async with open_sandbox(backend_name, variables={"UID": "1000"}):
            pass


async def test_the_locale_is_ours_unless_the_row_rules(backend_name: str) -> None:
    command = """printf '%s|' "${LC_ALL:-$LC_CTYPE}" """
    for variables in ({"LANG": "xx_XX.UTF-8"}, {"LC_MESSAGES": "xx_XX.UTF-8"}):
        async with open_sandbox(backend_name, variables=variables) as environment:
            assert await printed(environment, f"{command}; echo $LC_ALL") == "C.UTF-8|C.UTF-8\n"
    async with open_sandbox(backend_name, variables={"LC_ALL": "xx_XX.UTF-8"}) as environment:
        assert await printed(environment, command) == "xx_XX.UTF-8|"


async def test_working_directory_of_the_row(backend_name: str) -> None:
    async with open_sandbox(backend_name, cwd="made/for it") as environment:
        assert (await printed(environment, "pwd")).endswith("/made/for it\n")
    with pytest.raises(SetupFailed, match="/proc/none") as refused:
        async with open_sandbox(backend_name, cwd="/proc/none"):
            pass
    assert "cannot open" not in str(refused.value), "what followed from it"


async def test_tasks_share_nothing(backend_name: str) -> None:
    async with open_sandbox(backend_name) as first, open_sandbox(backend_name) as second:
        await printed(first, "export LEAK=1; echo secret >here; cd /usr; (sleep 47 >/dev/null &)")
        assert await printed(second, 'echo "[$LEAK]"; ls') == "[]\n"
        assert await printed(second, "pwd") != "/usr\n"


# bytes


async def test_output_that_is_no_utf8(sandbox: Environment) -> None:
    result = await sandbox.run(r"printf '\376\000\033[31m\n'; printf '\342\202'; sleep 0.3; printf '\254'", timeout=20)
    assert result.output == "\ufffd\0\x1b[31m\n€"
    assert (await sandbox.run("head -c 100000 /dev/urandom", timeout=20)).exit_code == 0


async def test_lone_surrogates_in_a_command(sandbox: Environment) -> None:
    assert await printed(sandbox, "echo '\ud800'") == "\ufffd\n"


async def test_much_output_keeps_head_and_tail(sandbox: Environment) -> None:
    result = await sandbox.run("seq 1 200000", timeout=20, max_chars=1000)
    head, tail = re.split(r"\n\[\.\.\. \d+ characters left out \.\.\.\]\n", result.output)
    whole = "".join(f"{number}\n" for number in range(1, 200001))
    assert (head, tail) == (whole[:400], whole[-600:])
    assert result.omitted_chars == len(whole) - 1000
    assert f"\n[... {result.omitted_chars} characters" in result.output


async def test_one_line_of_50_mb(sandbox: Environment) -> None:
    result = await sandbox.run("head -c 50000000 /dev/zero | tr '\\0' x", timeout=60)
    assert (len(result.output) > 50_000, result.omitted_chars) == (True, 49_950_000)


async def test_two_gigabytes_in_bounded_memory(sandbox: Environment) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.run("yes | head -c 2000000000", timeout=3)
    assert result.timed_out or result.omitted_chars == 1_999_950_000
    assert result.output.startswith("y\ny\n")
    assert "characters left out" in result.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert await printed(sandbox, "echo ok") == "ok\n"


async def test_command_of_one_megabyte(sandbox: Environment) -> None:
    text = "x'\"$(no)\\" * 100_000
    command = "cat >big <<'END'\n" + text + "\nEND\nwc -c <big; export SET=1; cd /usr"
    assert (await printed(sandbox, command)).strip() == str(len(text) + 1)
    assert await printed(sandbox, "pwd; echo $SET") == "/usr\n1\n"


async def test_nul_in_a_command_or_path_is_the_models_mistake(sandbox: Environment) -> None:
    with pytest.raises(ToolError, match="NUL"):
        await sandbox.run("echo a\0b", timeout=20)
    with pytest.raises(ToolError, match="NUL"):
        await sandbox.start("echo a\0b")
    with pytest.raises(ToolError, match="NUL"):
        await sandbox.write("a\0.txt", b"")
    with pytest.raises(ToolError, match="NUL"):
        await bytes_of(sandbox, "a\0.txt")


# processes


@pytest.mark.parametrize(
    "command",
    [
        "sleep N &",
        "nohup sleep N >/dev/null 2>&1 & disown",
        "setsid sleep N &",
        "(sleep N &)",
        "(setsid sleep N </dev/null >/dev/null 2>&1 &)",
    ],
)
async def test_a_background_process_does_not_hold_the_call(sandbox: Environment, command: str) -> None:
    seconds, began = unique(), time.monotonic()
    result = await sandbox.run(f"{command.replace('N', seconds)}\necho started", timeout=20)
    assert (result.output, result.exit_code, result.background) == ("started\n", 0, True)
    assert time.monotonic() - began < 15
    assert await living(sandbox, seconds) == 1
    assert not (await sandbox.run("true", timeout=20)).background


async def test_a_background_process_lives_on_and_spoils_no_later_output(sandbox: Environment) -> None:
    loop = "for i in 1 2 3 4 5 6 7 8; do echo late; sleep 0.1; done; echo survived >end"
    assert "now\n" in (await sandbox.run(f"({loop}) & echo now", timeout=20)).output
    for _ in range(4):
        assert await printed(sandbox, "sleep 0.1; echo clean") == "clean\n"

    async def survived() -> bool:
        return (await sandbox.run("cat end 2>/dev/null", timeout=20)).output == "survived\n"

    assert await eventually(survived)


async def test_output_within_the_grace_is_kept(sandbox: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_GRACE_SECONDS", 0.6)  # a busy machine needs more than there is
    result = await sandbox.run("(sleep 0.02; echo soon) & echo now", timeout=20)
    assert (result.output, result.background) == ("now\nsoon\n", False)


async def test_kill_0_harms_nobody_else(sandbox: Environment) -> None:
    await printed(sandbox, "export A=1")
    assert (await sandbox.run("kill 0; sleep 5", timeout=20)).exit_code == 143
    assert await printed(sandbox, "echo $A") == "1\n"


async def test_a_command_that_kills_its_channel(sandbox: Environment) -> None:
    await printed(sandbox, "export A=1")
    result = await sandbox.run("echo said; kill -9 $PPID", timeout=20)
    assert (result.output, result.exit_code) == ("said\n", 137)
    assert await printed(sandbox, "echo $A") == "1\n"


# time limits


async def test_timeout_kills_every_descendant_and_returns_what_was_printed(sandbox: Environment) -> None:
    earlier, mine = unique(), unique()
    await printed(sandbox, f"cd /usr; export A=1; sleep {earlier} >/dev/null 2>&1 &")
    began = time.monotonic()
    result = await sandbox.run(
        f"echo before; trap '' TERM; (sleep {mine}) & setsid sleep {mine} & (setsid sleep {mine} &)\n"
        f"bash -c 'trap \"\" TERM INT HUP; env -i /bin/sleep {mine}' & sleep {mine}",
        timeout=1,
    )
    assert time.monotonic() - began < 30
    assert (result.output, result.exit_code, result.timed_out) == ("before\n", 124, True)
    assert await living(sandbox, mine) == 0
    assert await living(sandbox, earlier) == 1
    assert await printed(sandbox, "pwd; echo $A") == "/usr\n1\n"


async def test_timeouts_again_and_again_leave_nothing(sandbox: Environment) -> None:
    seconds = unique()
    command = f"sh -c 'sleep {seconds} & sleep {seconds}'"
    results = [await sandbox.run(command, timeout=0.1) for _ in range(8)]
    assert all(result.timed_out for result in results)
    assert await living(sandbox, seconds) == 0


async def test_cancelled_command_is_killed(sandbox: Environment) -> None:
    seconds = unique()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await sandbox.run(f"sleep {seconds}", timeout=60)

    async def dead() -> bool:
        return await living(sandbox, seconds) == 0

    assert await eventually(dead)


# started processes


async def test_start_write_wait(sandbox: Environment) -> None:
    await printed(sandbox, "cd /usr; export A=1")
    process = await sandbox.start('pwd; echo "$A"; cat; echo err >&2; exit 7')
    assert process.exit_code() is None
    await process.write(b"hello\nrm -rf /\n")
    await process.close_stdin()
    assert await process.wait(10) == 7
    assert process.output() == "/usr\n1\nhello\nrm -rf /\nerr\n"
    with pytest.raises(ToolError):
        await process.write(b"more")
    assert await printed(sandbox, f"[ -d /proc/{process.pid} ] || echo gone") == "gone\n"


async def test_start_leaves_unread_input_alone(sandbox: Environment) -> None:
    process = await sandbox.start("read line; exit 0")
    await process.write(b"one\ntouch /tmp/executed\n")
    assert await process.wait(10) == 0
    assert (await sandbox.run("cat /tmp/executed", timeout=20)).exit_code == 1


async def test_kill_ends_the_whole_tree_and_nothing_else(sandbox: Environment) -> None:
    mine, others = unique(), unique()
    process = await sandbox.start(f"setsid sleep {mine} & sleep {mine}")
    other = await sandbox.start(f"sleep {others}")

    async def all_there() -> bool:
        return await living(sandbox, mine, others) == 3

    assert await eventually(all_there)
    assert await process.wait(0.1) is None
    await process.kill()
    assert process.exit_code() == 137
    assert await living(sandbox, mine) == 0
    assert await living(sandbox, others) == 1
    assert other.exit_code() is None


async def test_rolling_output(sandbox: Environment) -> None:
    process = await sandbox.start("seq 1 100000")
    assert await process.wait(20) == 0
    assert len(process.output()) == 200_000
    assert process.output().endswith("\n99999\n100000\n")


async def test_start_in_a_directory_that_is_none(sandbox: Environment) -> None:
    with pytest.raises(ToolError, match="no such directory"):
        await sandbox.start("true", cwd="/no/such")


async def test_pty(sandbox: Environment) -> None:
    process = await sandbox.start("test -t 0 && test -t 1 && echo terminal; exit 4", pty=True)
    assert await process.wait(10) == 4
    assert process.output() == "terminal\r\n"


async def test_a_terminal_leaves_the_shells_name_alone(sandbox: Environment) -> None:
    before = await printed(sandbox, "echo $SHELL; export SHELL=/no/such")
    process = await sandbox.start('echo "$SHELL"; env | grep -c -e ^SHELL=/no/such$ -e ^BATCH_SHELL', pty=True)
    assert await process.wait(10) == 0
    assert process.output() == "/no/such\r\n1\r\n"
    assert before.startswith("/")


# files

ODD_NAMES = ["plain.txt", "-dash", "sp ace", "qu'o\"te", "new\nline", "$(touch x)", "ünï", "*", "back\\slash", "-", "."]


async def test_files_with_odd_names(sandbox: Environment) -> None:
    names = ODD_NAMES[:-1]
    for name in names:
        assert await sandbox.write(name, name.encode()) is False
    for name in names:
        assert await bytes_of(sandbox, name) == name.encode()
    listed = await sandbox.list(".")
    assert [entry.name for entry in listed] == sorted(names)
    assert all(entry.kind == "file" and entry.size == len(entry.name.encode()) for entry in listed)
    for name in names:
        await sandbox.delete(name)
    assert await sandbox.list(".") == []


@pytest.mark.parametrize("size", [0, 1, 32_768, 32_769, 3_000_000])
async def test_binary_upload_and_download(sandbox: Environment, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    await sandbox.write("data.bin", data)
    assert await bytes_of(sandbox, "data.bin") == data
    assert int(await printed(sandbox, "wc -c <data.bin")) == size


async def test_parents_are_made_and_links_followed(sandbox: Environment) -> None:
    assert await sandbox.write("a/b/c.txt", b"1") is True
    assert await sandbox.write("a/b/d.txt", b"2") is False
    await printed(sandbox, "ln -s a/b/c.txt link; chmod 750 a/b/c.txt; cd a")
    await sandbox.write("../link", b"3")
    assert await printed(sandbox, "cat b/c.txt; ls -l b/c.txt | cut -c1-10") == "3-rwxr-x---\n"
    await sandbox.delete("../link")
    assert await bytes_of(sandbox, "b/c.txt") == b"3"


async def test_list_kinds(sandbox: Environment) -> None:
    await printed(
        sandbox, "mkdir d; echo hi >.hidden; ln -s nowhere l; mkfifo p; seq 1 450 | while read n; do :>f$n; done"
    )
    kinds = {entry.name: entry.kind for entry in await sandbox.list(".")}
    assert len(kinds) == 454
    assert (kinds["d"], kinds[".hidden"], kinds["l"], kinds["p"], kinds["f450"]) == (
        "directory",
        "file",
        "link",
        "other",
        "file",
    )


async def test_what_the_model_can_mend(sandbox: Environment) -> None:
    await sandbox.write("file", b"")
    await printed(sandbox, "mkdir -p dir; mkfifo pipe")
    mistakes = [
        (bytes_of(sandbox, "none"), "no such file"),
        (bytes_of(sandbox, "dir"), "is a directory"),
        (bytes_of(sandbox, "pipe"), "not a regular file"),
        (bytes_of(sandbox, ""), "empty"),
        (sandbox.write("dir", b"x"), "is a directory"),
        (sandbox.write("file/x", b"x"), "(not a directory|exists)"),
        (sandbox.write("/proc/none/x", b"x" * 100_000), "no such file"),
        (sandbox.list("file"), "not a directory"),
        (sandbox.list("none"), "no such file"),
        (sandbox.delete("none"), "no such file"),
        (sandbox.delete("dir"), "is a directory"),
    ]
    for attempt, message in mistakes:
        with pytest.raises(ToolError, match=message):
            await attempt
    assert await printed(sandbox, "echo usable") == "usable\n"


async def test_a_reader_that_stops_early_leaves_nothing(sandbox: Environment) -> None:
    name = f"/tmp/big{unique()}"
    await printed(sandbox, f"head -c 30000000 /dev/zero >{name}")
    reader = sandbox.read(name)
    assert set(await anext(reader)) == {0}
    await reader.aclose()  # type: ignore[attr-defined]

    async def closed() -> bool:
        return await printed(sandbox, f"ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c {name} || :") == "0\n"

    assert await eventually(closed)
    await sandbox.delete(name)


async def test_files_are_read_while_a_command_runs(sandbox: Environment) -> None:
    await sandbox.write("f", b"x")
    command = asyncio.create_task(sandbox.run("sleep 2; echo done", timeout=20))
    reads = await asyncio.gather(*(bytes_of(sandbox, "f") for _ in range(6)))
    assert (set(reads), command.done()) == ({b"x"}, False)
    assert (await command).output == "done\n"


# the end


async def test_nothing_can_be_done_after_the_end(backend_name: str) -> None:
    async with open_sandbox(backend_name) as environment:
        await printed(environment, "true")
    with pytest.raises(EnvironmentLost):
        await environment.run("true", timeout=5)
