"""Processes whose output is read as it comes: nothing lost, nothing held without bound, nothing left over."""

import asyncio
import hashlib
import resource
import secrets

from tests.contract.environments import eventually, open_sandbox, printed
from tools.environments.base import Environment, Process


async def whole(process: Process) -> bytes:
    pieces = []
    while piece := await process.read():
        pieces.append(piece)
    return b"".join(pieces)


async def test_every_byte_in_order_from_the_first_on(sandbox: Environment) -> None:
    process = await sandbox.start("seq 1 300000; printf '\\376\\000end'; exit 3", piped=True)
    output = await whole(process)
    assert output == b"".join(b"%d\n" % number for number in range(1, 300_001)) + b"\xfe\0end"
    assert await process.wait(10) == 3
    assert (await process.read(), process.output()) == (b"", "")


async def test_words_there_and_back(sandbox: Environment) -> None:
    process = await sandbox.start('while read -r word; do echo "<$word>"; done; echo bye', piped=True)
    for number in range(20):
        await process.write(b"%d\n" % number)
        assert await process.read() == b"<%d>\n" % number
    await process.close_stdin()
    assert await whole(process) == b"bye\n"


async def test_the_process_waits_for_a_slow_reader(sandbox: Environment) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    process = await sandbox.start("head -c 60000000 /dev/zero", piped=True)
    await asyncio.sleep(0.3)
    assert process.exit_code() is None
    digest, size = hashlib.sha256(), 0
    while piece := await process.read():
        digest.update(piece)
        size += len(piece)
    assert (size, digest.hexdigest()) == (60_000_000, hashlib.sha256(bytes(60_000_000)).hexdigest())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB; the zeros above are 60 MB


async def test_a_read_that_is_given_up_loses_nothing(sandbox: Environment) -> None:
    process = await sandbox.start('read x; printf %s "$x"', piped=True)
    for _ in range(3):
        try:
            async with asyncio.timeout(0.02):
                await process.read()
        except TimeoutError:
            continue
    await process.write(b"late\n")
    assert await whole(process) == b"late"


async def test_killed_while_nobody_reads(sandbox: Environment) -> None:
    word = secrets.token_hex(8)
    process = await sandbox.start(f"yes {word}", piped=True)
    await asyncio.sleep(0.2)
    async with asyncio.timeout(8):
        await process.kill()
        await whole(process)
    assert process.exit_code() == 137
    assert await living(sandbox, word, 0)


async def living(environment: Environment, argument: str, count: int) -> bool:
    """Whether so many processes with this argument live, or soon do."""
    command = f"grep -slzx '[{argument[0]}]{argument[1:]}' /proc/[0-9]*/cmdline | wc -l"

    async def so_many() -> bool:
        return int(await printed(environment, command)) == count

    return await eventually(so_many)


async def test_what_an_ended_process_left_can_be_killed_with_it(sandbox: Environment) -> None:
    seconds = f"{secrets.randbelow(10**6) + 10**4}.25"
    process = await sandbox.start(f"setsid sleep {seconds} </dev/null >/dev/null 2>&1 & exit 5")
    assert await process.wait(10) == 5
    assert await living(sandbox, seconds, 1)
    await process.kill()
    assert await living(sandbox, seconds, 0)
    assert process.exit_code() == 5


async def test_what_an_ended_process_left_ends_with_the_sandbox(backend_name: str) -> None:
    seconds = f"{secrets.randbelow(10**6) + 10**4}.25"
    async with open_sandbox(backend_name) as sandbox:
        process = await sandbox.start(f"sleep {seconds} & exit 0")
        assert await process.wait(10) == 0
        assert await living(sandbox, seconds, 1)
    async with open_sandbox("local") as outside:
        assert await living(outside, seconds, 0)


async def test_a_reader_hears_of_the_end_of_the_sandbox(backend_name: str) -> None:
    async with open_sandbox(backend_name) as sandbox:
        process = await sandbox.start("sleep 60", piped=True)
        reading = asyncio.create_task(process.read())
        await asyncio.sleep(0)
    assert await asyncio.wait_for(reading, 30) == b""


async def test_ended_processes_leave_no_shell(sandbox: Environment) -> None:
    shells = "ls -l /proc/[0-9]*/exe 2>/dev/null | grep -c 'sh$' || :"
    before = int(await printed(sandbox, shells))
    for _ in range(5):
        process = await sandbox.start("true")
        assert await process.wait(10) == 0

    async def no_more() -> bool:
        return int(await printed(sandbox, shells)) <= 2 * before  # another channel may be kept open, not one for each

    if sandbox.backend != "local":  # which sees the whole machine's
        assert await eventually(no_more)
