"""How much of everything is run: enough for steady figures, little enough for a coffee."""

from msgspec import Struct


class Load(Struct, frozen=True):
    """One run against the endpoint: `prompts` is a multiple of `concurrency`, so that the ideal is a whole number of
    rounds."""

    latency: float
    concurrency: int
    prompts: int


class Sizes(Struct, frozen=True, kw_only=True):
    """See `FIGURES` for what each is for. With sizes that measure nothing, figures have no targets."""

    name: str = "normal"
    measures: bool = True
    cpu_prompts: int = 1000
    cpu_rounds: int = 3
    loads: tuple[Load, ...] = (
        Load(0.0, 1, 200),
        Load(0.0, 16, 800),
        Load(0.0, 100, 800),
        Load(0.0, 400, 800),
        Load(0.2, 1, 8),
        Load(0.2, 16, 160),
        Load(0.2, 100, 1000),
        Load(0.2, 400, 1600),
        Load(2.0, 1, 2),
        Load(2.0, 16, 32),
        Load(2.0, 100, 200),
        Load(2.0, 400, 800),
    )
    memory_latency: float = 2.0
    memory_concurrency: tuple[int, int] = (16, 400)
    starts: int = 7
    commands: int = 300
    sandbox_commands: int = 1000
    sandbox_rounds: int = 5
    limit_per_second: int = 40
    limit_seconds: int = 180
    minute_requests: int = 1000
    minute_prompts: int = 220
    journals: tuple[int, ...] = (10_000, 1_000_000)
    stream: tuple[int, int] = (1_000, 100_000)
    counted_rows: int = 600
    counting_rounds: int = 7


NORMAL = Sizes()
FULL = Sizes(name="full", stream=(1_000, 1_000_000))
QUICK = Sizes(
    name="quick",
    measures=False,
    cpu_prompts=8,
    cpu_rounds=1,
    loads=(Load(0.05, 4, 8),),
    memory_latency=0.3,
    memory_concurrency=(2, 6),
    starts=1,
    commands=5,
    sandbox_commands=3,
    sandbox_rounds=1,
    limit_seconds=4,  # the least that has a whole second between the first and the last
    minute_prompts=4,
    journals=(200,),
    stream=(10, 100),
    counted_rows=20,
    counting_rounds=1,
)
