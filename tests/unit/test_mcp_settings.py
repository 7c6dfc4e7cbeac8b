"""What a run is told of MCP servers: forms, mistakes, and what stays out of its files."""

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.catalog import Sources, open_catalog
from agent.outcome import RolloutPolicy
from agent.text import MIN_SECRET_LENGTH, secrets_from
from batch.manifest import Invocation, differences
from batch.settings import RunSettings, for_the_record, load_settings, recorded, resume_command
from tools.base import ToolSpec
from tools.errors import UsageProblem
from tools.mcp.servers import ListedTool, Listing, McpServer, check_servers, filled, secret_variables, without_secrets

BASE = ["--dataset_file=d.jsonl", "--run_name=r", "--model=m"]
SERVERS = {
    "files": McpServer(
        command="npx", args=("-y", "server", "${HOME}"), env={"PORT": "8080", "ITS_TOKEN": "t0ken-of-files"}
    ),
    "net": McpServer(
        url="https://me:secret@x.org/mcp?api_key=abc&kind=1",
        headers={"Authorization": "Bearer abcdefghijkl", "X-API-Key": "${WEB_KEY}", "X-Kind": "plain"},
        tools=("search",),
        timeout=5,
    ),
}
FORMS = {
    "files": {
        "command": "npx",
        "args": ["-y", "server", "${HOME}"],
        "env": {"PORT": 8080, "ITS_TOKEN": "t0ken-of-files"},
    },
    "net": {
        "url": "https://me:secret@x.org/mcp?api_key=abc&kind=1",
        "headers": {"Authorization": "Bearer abcdefghijkl", "X-API-Key": "${WEB_KEY}", "X-Kind": "plain"},
        "tools": ["search"],
        "timeout": 5,
    },
}
ENVIRON = {"HOME": "/home/me", "WEB_KEY": "key-of-the-web"}


def load(*argv: str, **environ: str) -> RunSettings:
    return load_settings([*BASE, *argv], environ)[0]


def test_servers_come_as_a_flag_a_file_yaml_or_a_variable(tmp_path: Path) -> None:
    text = json.dumps(FORMS)
    usual = tmp_path / ".mcp.json"
    usual.write_text(json.dumps({"mcpServers": FORMS}, indent="\t"), encoding="utf-8")
    config = tmp_path / "run.yaml"
    config.write_text(f"mcp_servers: {text}\n", encoding="utf-8")
    pointing = tmp_path / "pointing.yaml"
    pointing.write_text(f"mcp_servers: {usual}\n", encoding="utf-8")
    for settings in (
        load(f"--mcp_servers={text}"),
        load(f"--mcp-servers={usual}"),
        load(f"--config={config}"),
        load(f"--config={pointing}"),
        load(BATCH_RUNNER_MCP_SERVERS=text),
    ):
        assert settings.mcp_servers == SERVERS
    assert load("--mcp_servers={a: {command: [cat, 1]}}").mcp_servers == {"a": McpServer(command=("cat", "1"))}
    assert load("--mcp_servers={}").mcp_servers == {}
    assert load().mcp_servers == {}


def test_a_command_is_words() -> None:
    assert McpServer(command="npx -y 'a b'").words == ("npx", "-y", "a b")
    assert McpServer(command="my program", args=("x",)).words == ("my program", "x")
    assert McpServer(command=("a", "b"), args=("c",)).words == ("a", "b", "c")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"a": {}}, "a: give command or url"),
        ({"a": {"command": "x", "url": "http://x"}}, "a: give one of command and url"),
        ({"a b": {"command": "x"}}, "a b: a name of at most 32 letters"),
        ({"web": {"command": "x"}}, "web: this is the name of a built-in tool or toolset"),
        ({"bash": {"command": "x"}}, "bash: this is the name of a built-in"),
        ({"a": {"url": "ftp://x"}}, "a: url: expected one that starts with http"),
        ({"a": {"url": "http://x", "env": {"A": "1"}}}, "a: args, env and cwd go with command"),
        ({"a": {"command": "x", "headers": {"A": "1"}}}, "a: headers go with url"),
        ({"a": {"url": "http://x", "type": "sse"}}, "a: the type is stdio or http"),
        ({"a": {"url": "http://x", "type": "stdio"}}, "a: type stdio goes with command"),
        ({"a": {"command": "'x"}}, "a: command: its quotes are not closed"),
        ({"a": {"comand": "x"}}, "--mcp_servers: Object contains unknown field `comand` - at `$[...]`"),
        ({"a": {"command": "x", "timeout": 0}}, "--mcp_servers: Expected `float` > 0"),
        ({"a": {"command": "x", "env": {"KEY": ["secret"]}}}, "--mcp_servers: Expected `str`, got `array`"),
        ({"a": "x"}, "--mcp_servers: Expected `object`, got `str`"),
        ("- x\n- y", "--mcp_servers: Expected `object`, got `array`"),
        (
            {"a-b": {"url": "http://x", "headers": {"KEY": "k1"}}, "a_b": {"command": "x", "env": {"KEY": "k2"}}},
            "rename one",
        ),
    ],
)
def test_mistakes_are_named_without_values(given: Any, told: str) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(UsageProblem) as caught:
        secret_variables(load(f"--mcp_servers={text}").mcp_servers, {})
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "{a: [}", "no/such/file.json", "a: b\n: c: ["])
def test_texts_that_hold_no_mapping(text: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        load(f"--mcp_servers={text}")
    assert "--mcp_servers: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_travel_as_variables_that_are_known_as_secrets() -> None:
    variables = secret_variables(SERVERS, ENVIRON)
    assert variables == {
        "MCP_FILES_ITS_TOKEN_TOKEN": "t0ken-of-files",
        "MCP_NET_AUTHORIZATION_TOKEN": "abcdefghijkl",
        "MCP_NET_X_API_KEY_TOKEN": "key-of-the-web",
        "MCP_NET_URL_PASSWORD_TOKEN": "secret",
        "MCP_NET_URL_API_KEY_TOKEN": "abc",
    }
    environ = {**ENVIRON, **variables}
    long = {name for name, value in variables.items() if len(value) >= MIN_SECRET_LENGTH}
    assert set(secrets_from(variables, {})[0]) == long
    assert len(long) == 3
    travelling = without_secrets(SERVERS, environ)
    sent = msgspec.msgpack.encode(RolloutPolicy(sources=Sources(servers=travelling)))
    assert not any(secret.encode() in sent for secret in variables.values())
    received = msgspec.msgpack.decode(sent, type=RolloutPolicy).sources.servers
    assert {name: filled(server, environ) for name, server in received.items()} == {
        name: filled(server, ENVIRON) for name, server in SERVERS.items()
    }


def test_a_variable_that_is_not_set_is_said_by_its_own_name() -> None:
    servers = {"a": McpServer(url="http://x", headers={"X-Key": "${NOT_SET}"})}
    assert secret_variables(servers, {}) == {}
    with pytest.raises(UsageProblem, match="the variable NOT_SET is not set"):
        filled(without_secrets(servers, {})["a"], {})


def test_the_manifest_holds_names_and_no_values() -> None:
    settings = load(f"--mcp_servers={json.dumps(FORMS)}")
    kept = for_the_record(settings)
    assert kept["mcp_servers"] == {
        "files": {
            "command": "npx",
            "args": ["-y", "server", "${HOME}"],
            "env": {"PORT": "[REDACTED]", "ITS_TOKEN": "[REDACTED]"},
        },
        "net": {
            "url": "https://x.org/mcp?api_key=[REDACTED]&kind=1",
            "headers": {"Authorization": "[REDACTED]", "X-API-Key": "${WEB_KEY}", "X-Kind": "[REDACTED]"},
            "tools": ["search"],
            "timeout": 5.0,
        },
    }
    again = recorded({"settings": msgspec.json.decode(msgspec.json.encode(kept))})
    assert for_the_record(again) == kept
    check_servers(again.mcp_servers)
    assert "t0ken-of-files" not in resume_command(settings, [])


def test_a_resume_notices_another_module_and_other_servers() -> None:
    def invocation(sha: str, **servers: McpServer) -> Invocation:
        settings = for_the_record(msgspec.structs.replace(load(), mcp_servers=servers))
        return Invocation(
            run_name="r",
            settings=settings,
            dataset={},
            versions={},
            backend="local",
            started_at="2026-01-01T00:00:00.000Z",
            host="h",
            tools_sha256=sha,
        )

    one, other = McpServer(command="x"), McpServer(command="y")
    before = msgspec.to_builtins(invocation("1", a=one))
    assert differences(before, invocation("1", a=one)) == []
    assert [told.partition(":")[0] for told in differences(before, invocation("2", a=one))] == ["tools_module"]
    for changed in (invocation("1", a=other), invocation("1"), invocation("1", b=one)):
        assert [told.partition(":")[0] for told in differences(before, changed)] == ["mcp_servers"]


def listed(server: str, tool: str) -> ListedTool:
    spec = ToolSpec(f"mcp_{server}_{tool}", "A tool.", {"type": "object", "properties": {}})
    return ListedTool(server=server, name=tool, spec=spec)


def test_a_catalog_knows_servers_and_what_is_lacking() -> None:
    servers = {"a": McpServer(command="x"), "b": McpServer(command="y", tools=("t",)), "c": McpServer(command="z")}
    listing = Listing(
        tools=(listed("a", "one"), listed("a", "two")), protocols={"a": "1"}, lacking={"b": "gone", "c": "off"}
    )
    catalog = open_catalog(Sources(servers=servers, listing=listing), {"todo": "time"})
    assert catalog.toolsets["a"] == ("mcp_a_one", "mcp_a_two")
    assert catalog.missing(["a", "b", "c", "mcp_b_t", "todo"]) == {
        "b": "gone",
        "c": "off",
        "mcp_b_t": "gone",
        "todo": "time",
    }
    assert [tool.spec.name for tool in catalog.select(catalog.resolve_names(["a", "b", "c"]), ["mcp_a_two"])] == [
        "mcp_a_one"
    ]
    assert catalog.toolset_of("mcp_a_one") == "a"
    states = {name: (tools, state) for name, tools, state in catalog.describe()}
    assert states["c"] == ("", "off")
    assert states["a"] == ("mcp_a_one, mcp_a_two", "ready")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "def mcp_a_one():\n    'One.'\nTOOLS = [mcp_a_one]",
            "tool mcp_a_one: it is both the tools_module's and an MCP",
        ),
        ("def f():\n    'One.'\nTOOLS = [f]\nTOOLSETS = {'a': ['f']}", "toolset a: it is both"),
        ("DISTRIBUTIONS = {'d': {'a': 50, 'b': 1}}", "DISTRIBUTIONS d: Unknown tool or toolset 'b'"),
    ],
)
def test_names_of_module_and_servers_are_kept_apart(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    listing = Listing(tools=(listed("a", "one"),), protocols={"a": "1"})
    with pytest.raises(UsageProblem) as caught:
        open_catalog(Sources(module=f"{tmp_path}/mine.py", servers={"a": McpServer(command="x")}, listing=listing), {})
    assert told in str(caught.value)


KEY = "k3y-that-must-not-show"
IN_WORDS = {
    "option": (["--token", KEY], ["--token", "[REDACTED]"]),
    "equals": ([f"--api-key={KEY}"], ["--api-key=[REDACTED]"]),
    "camel": (["--accessToken", KEY], ["--accessToken", "[REDACTED]"]),
    "joined": (["--apikey", KEY], ["--apikey", "[REDACTED]"]),
    "pat": (["--pat", KEY, "--github-pat", f"{KEY}2"], ["--pat", "[REDACTED]", "--github-pat", "[REDACTED]"]),
    "pass": (["--pass", KEY, f"--pwd={KEY}2"], ["--pass", "[REDACTED]", "--pwd=[REDACTED]"]),
    "blanks": ([f"--passphrase={KEY} and more"], ["--passphrase=[REDACTED]"]),
    "header": (["--header", f"Authorization: Bearer {KEY}"], ["--header", "Authorization: Bearer [REDACTED]"]),
    "-H": (["-H", f"X-Key: {KEY}"], ["-H", "X-Key: [REDACTED]"]),
    "header=": ([f"--header=X-Api-Key:{KEY}"], ["--header=X-Api-Key:[REDACTED]"]),
    "header apart": (
        ["--header", "Authorization", f"Bearer {KEY}", "-v"],
        ["--header", "Authorization", "Bearer [REDACTED]", "-v"],
    ),
    "headers": (
        ["--headers", f'{{"Authorization": "Bearer {KEY}", "X-Kind": "plain"}}'],
        ["--headers", '{"Authorization": "Bearer [REDACTED]", "X-Kind": "plain"}'],
    ),
    "headers=": ([f'--headers={{"apiKey":"{KEY}"}}'], ['--headers={"apiKey":"[REDACTED]"}']),
    "scheme": (["--authorization", f"Bearer {KEY}", "-v"], ["--authorization", "Bearer [REDACTED]", "-v"]),
    "variable": (["-e", f"GITHUB_TOKEN={KEY}", "image"], ["-e", "GITHUB_TOKEN=[REDACTED]", "image"]),
    "password": (["-e", f"PGPASSWORD={KEY} and more"], ["-e", "PGPASSWORD=[REDACTED]"]),
    "dashes": (["--password", f"-{KEY}"], ["--password", "[REDACTED]"]),
    "two dashes": (["--token", f"--{KEY}", "--sort"], ["--token", "[REDACTED]", "--sort"]),
    "no value": (["--token", "--api-key", KEY], ["--token", "--api-key", "[REDACTED]"]),
    "no value=": (["--token", f"--api-key={KEY}"], ["--token", "--api-key=[REDACTED]"]),
    "twice": (["--token", KEY, "--token", f"{KEY}2"], ["--token", "[REDACTED]", "--token", "[REDACTED]"]),
    "line": (["-c", f"API_KEY={KEY} server --flag"], ["-c", "API_KEY=[REDACTED] server --flag"]),
    "line of all": (
        ["-lc", f"export A_TOKEN='{KEY} 1'; cd /x && server --pat \"{KEY}2\" -H 'Authorization: Bearer {KEY}3' | cat"],
        [
            "-lc",
            "export A_TOKEN='[REDACTED]'; cd /x && server --pat \"[REDACTED]\" "
            "-H 'Authorization: Bearer [REDACTED]' | cat",
        ],
    ),
    "line elsewhere": (["host", f"API_KEY={KEY} server"], ["host", "API_KEY=[REDACTED] server"]),
    "url": (
        [f"https://x.org/mcp?exaApiKey={KEY}&sort_key=name"],
        ["https://x.org/mcp?exaApiKey=[REDACTED]&sort_key=name"],
    ),
    "env=": ([f"--env=GITHUB_TOKEN={KEY}", "image"], ["--env=GITHUB_TOKEN=[REDACTED]", "image"]),
    "-e joined": ([f"-esome_key={KEY}"], ["-esome_key=[REDACTED]"]),
    "-e lower": (["-e", f"some_key={KEY}", "image"], ["-e", "some_key=[REDACTED]", "image"]),
    "--env lower": (["--env", f"some_key={KEY}"], ["--env", "some_key=[REDACTED]"]),
    "nested": (["--set", f"auth.token={KEY}"], ["--set", "auth.token=[REDACTED]"]),
    "nested=": ([f"--args=--token={KEY}"], ["--args=--token=[REDACTED]"]),
    "-H joined": ([f"-HX-Api-Key: {KEY}"], ["-HX-Api-Key: [REDACTED]"]),
    "X-Auth": (["-H", f"X-Auth: {KEY}"], ["-H", "X-Auth: [REDACTED]"]),
    "any key of a header": (["-H", f"Some-Key: {KEY}"], ["-H", "Some-Key: [REDACTED]"]),
    "coded name": ([f"https://x.org/?api%5Fkey={KEY}&a=1"], ["https://x.org/?api%5Fkey=[REDACTED]&a=1"]),
    "fragment": ([f"https://x.org/#access_token={KEY}&a=1"], ["https://x.org/#access_token=[REDACTED]&a=1"]),
    "signature": (
        [f"https://x.org/?sig={KEY}&X-Amz-Signature={KEY}2&auth={KEY}3"],
        ["https://x.org/?sig=[REDACTED]&X-Amz-Signature=[REDACTED]&auth=[REDACTED]"],
    ),
    "pairs": ([f"Server=h;Password={KEY};x=y"], ["Server=h;Password=[REDACTED];x=y"]),
    "pairs first": (["--db", f"password={KEY};x=y"], ["--db", "password=[REDACTED];x=y"]),
    "pairs=": ([f"--db=Driver={{A B}};UID=sa;PWD='{KEY};1';"], ["--db=Driver={A B};UID=sa;PWD='[REDACTED]';"]),
    "pairs with a URL": (
        [f"Endpoint=sb://x.org/;SharedAccessKeyName=Root;SharedAccessKey={KEY}="],
        ["Endpoint=sb://x.org/;SharedAccessKeyName=Root;SharedAccessKey=[REDACTED]"],
    ),
    "password with /": ([f"postgres://me:{KEY}/a@x.org/db?a=b@c"], ["postgres://x.org/db?a=b@c"]),
    "password with ?": ([f"--dsn=postgres://me:ab?{KEY}@x.org/db"], ["--dsn=postgres://x.org/db"]),
    "password with @": ([f"postgres://me:a@{KEY}@x.org/db"], ["postgres://x.org/db"]),
    "code": (["-c", f"import x; TOKEN = '{KEY}'; x.run(1)"], ["-c", "import x; TOKEN = '[REDACTED]'; x.run(1)"]),
    "code of an item": (["-c", f"environ['TOKEN']='{KEY}'"], ["-c", "environ['TOKEN']='[REDACTED]'"]),
    "code of a call": (["-e", f'run({{apiKey: "{KEY}"}})'], ["-e", 'run({apiKey: "[REDACTED]"})']),
    "escaped": (
        ["-c", f'x --headers "{{\\"token\\": \\"{KEY}\\"}}"'],
        ["-c", 'x --headers "{\\"token\\": \\"[REDACTED]\\"}"'],
    ),
    "capitals": (["--token", f"--X{KEY}"], ["--token", "[REDACTED]"]),
}


@pytest.mark.parametrize("name", IN_WORDS)
@pytest.mark.parametrize("form", ["text", "words", "args"])
def test_keys_in_a_command_are_kept_out_as_others_are(name: str, form: str) -> None:
    given, kept = IN_WORDS[name]
    server = {
        "text": McpServer(command=shlex.join(["npx", *given])),
        "words": McpServer(command=("npx", *given)),
        "args": McpServer(command="npx", args=tuple(given)),
    }[form]
    settings = msgspec.structs.replace(load(), mcp_servers={"s": server})
    recorded_one = for_the_record(settings)["mcp_servers"]["s"]
    words = recorded_one["command"] if form != "args" else [recorded_one["command"], *recorded_one["args"]]
    assert words == ["npx", *kept]
    assert KEY not in resume_command(settings, [])
    assert for_the_record(recorded({"settings": for_the_record(settings)})) == for_the_record(settings)
    variables = secret_variables({"s": server}, {})
    assert all(KEY in value for value in variables.values())
    assert len(secrets_from(variables, {})[0]) == len(variables) == kept.count("[REDACTED]") or name != "twice"
    travelling = without_secrets({"s": server}, variables)
    assert KEY.encode() not in msgspec.msgpack.encode(travelling)
    assert filled(travelling["s"], variables).words == ("npx", *given)


def test_words_that_hold_no_key_stay() -> None:
    words = (
        "npx",
        "-y",
        "--tokens=5",
        "--verbose",
        "--no-token",
        "x",
        "--key-file",
        "k.pem",
        "https://x.org/a:b",
        "--token",
    )
    for server in (McpServer(command=words), McpServer(command="npx -y server --port=1"), McpServer(command="cat")):
        assert secret_variables({"s": server}, {}) == {}
        assert without_secrets({"s": server}, {})["s"] == server
        assert load_recorded(server) == server
    referring = McpServer(command="npx", args=("--token", "${NOTES}", "--header", "Authorization: Bearer ${NOTES}"))
    assert load_recorded(referring) == referring
    assert set(secret_variables({"s": referring}, {"NOTES": KEY}).values()) == {KEY}
    url = McpServer(command="npx", args=("mcp-remote", f"https://me:{KEY}@x.org/?api_key={KEY}&a=1"))
    assert load_recorded(url).args == ("mcp-remote", "https://x.org/?api_key=[REDACTED]&a=1")


def load_recorded(server: McpServer) -> McpServer:
    kept = for_the_record(msgspec.structs.replace(load(), mcp_servers={"s": server}))
    return recorded({"settings": msgspec.json.decode(msgspec.json.encode(kept))}).mcp_servers["s"]


@pytest.mark.parametrize(
    "words",
    [
        ("--sort-key", "a-name-of-some-length"),
        ("--partition-key", "identifier-of-rows"),
        ("--primary-key=identifier-of-rows",),
        ("--key-file", "/some/folder/key.pem"),
        ("--private-key-path", "/some/folder/key.pem"),
        ("--key", "identifier-of-rows"),
        ("-k", "identifier-of-rows"),
        ("--max-tokens", "100000000000000"),
        ("--bypass", "identifier-of-rows"),
        ("--headers", '{"X-Kind": "identifier-of-rows", "sort_key": "identifier-of-rows"}'),
        ("--header", "Accept", "application/json-and-more"),
        ("https://x.org/a?sort_key=identifier-of-rows",),
        ("-c", "cd /some/folder; exec server --sort-key identifier-of-rows"),
    ],
)
def test_what_is_no_credential_is_left_alone(words: tuple[str, ...]) -> None:
    server = McpServer(command="npx", args=words)
    assert secret_variables({"s": server}, {}) == {}
    assert load_recorded(server) == server


HARMLESS = {
    "an option": ("--use-token", "--port", "1"),
    "an option=": ("--use-token", "--max_rows=100", "--with-credentials", "--logLevel", "debug"),
    "a letter": ("--use-token", "-v", "--pass", "-q"),
    "a truth": ("--token", "true", "--token=false"),
    "a number": ("--max-token", "4096", "--pass=2", "--token=0.5"),
    "a path": ("--private-key", "/run/secrets/a-key-of-mine", "--with-credentials", "/data"),
    "a relative path": (
        "--cookie",
        "~/.cookies.txt",
        "--cookie=./a-jar-of-them.txt",
        "--credentials",
        "../x/keys.json",
    ),
    "a path of Windows": ("--credentials", "C:\\Users\\me\\keys.json"),
    "a pattern": ("--pat", "*.txt", "--pat=src/**/*_test.py", "--pat", "**"),
    "a special token": (
        "--eos-token",
        "<eos>",
        "--pad-token=<|pad|>",
        "--stop-token",
        "</s>",
        "--mask-token",
        "[MASK]",
    ),
    "a user": ("git+ssh://git@github.com/a/b", "ssh://me-of-some-length@x.org/a"),
    "a port": ("http://x.org:8080/some/folder@1.2", "http://${HOST_OF_IT}:${PORT_OF_IT}/some/folder@1.2"),
    "a host of IPv6": ("http://[::1]:8080/some/folder@1.2",),
    "a variable that is passed on": ("-e", "GITHUB_TOKEN", "image-of-some-length", "--env", "A_KEY", "image-of-it"),
    "pairs": ("Server=some.host.org;Database=name-of-it;Timeout=5",),
    "code": ("-c", "tokens = 'some of a length'; sort_key = 'name-of-it'"),
    "a parameter": ("https://x.org/a?auth=true&sort_sig_by=name-of-some-length#sort_key=name-of-it",),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_key_looks_like_is_none(name: str) -> None:
    server = McpServer(command="npx", args=HARMLESS[name])
    assert secret_variables({"s": server}, {}) == {}
    assert load_recorded(server) == server


def test_the_password_of_a_url_may_be_a_variable() -> None:
    server = McpServer(command="npx", args=("postgres://me:${NOTES}@x.org/db", f"postgres://me:ab#{KEY}@x.org/db"))
    assert load_recorded(server).args == ("postgres://me:${NOTES}@x.org/db", "postgres://x.org/db")
    assert set(secret_variables({"s": server}, {"NOTES": "n"}).values()) == {"n", f"ab#{KEY}"}


def test_arguments_may_name_the_servers_own_variables() -> None:
    server = McpServer(
        command="npx",
        args=("mcp-remote", "https://x.org/mcp", "--header", "Authorization:${AUTH_HEADER}", "${HOME}", "${REGION}"),
        env={"AUTH_HEADER": f"Bearer {KEY}", "HOME": "/its/own", "REGION": "${WHERE}"},
    )
    environ = {"HOME": "/home/me", "WHERE": "here"}
    reached = filled(server, environ)
    assert reached.words[4:] == (f"Authorization:Bearer {KEY}", "/home/me", "here")
    assert reached.env["AUTH_HEADER"] == f"Bearer {KEY}"
    variables = secret_variables({"s": server}, environ)
    assert KEY in secrets_from(variables, {})[0].values()
    travelling = without_secrets({"s": server}, variables)
    assert KEY.encode() not in msgspec.msgpack.encode(travelling)
    assert filled(travelling["s"], {**environ, **variables}) == reached
    assert load_recorded(server).args == server.args
    assert KEY not in json.dumps(msgspec.to_builtins(load_recorded(server)))
    with pytest.raises(UsageProblem, match="the variable WHERE is not set"):
        filled(server, {})


def test_keys_in_urls_and_inside_of_values_are_known() -> None:
    servers = {
        "a": McpServer(
            command="npx",
            env={
                "HEADERS": f'{{"Authorization": "Bearer {KEY}1", "Version": "2022-06-28-and-on"}}',
                "DATABASE_URL": f"postgres://me:{KEY}2@db.org/x",
                "OPENAI_KEY": f"{KEY}3 and more",
                "PWD": "/some/folder/of/its",
            },
        ),
        "b": McpServer(
            url=f"https://{KEY}4@x.org/mcp?tavilyApiKey={KEY}5&key={KEY}6&sort_key=a-name-of-some-length",
            headers={"Authorization": f"Token {KEY}7", "X-Kind": "a-kind-of-some-length"},
        ),
    }
    variables = secret_variables(servers, {})
    assert sorted(variables.values()) == [f"{KEY}{n}" + " and more" * (n == 3) for n in range(1, 8)]
    assert len(secrets_from(variables, {})[0]) == 7
    travelling = without_secrets(servers, variables)
    assert KEY.encode() not in msgspec.msgpack.encode(travelling)
    for name, server in servers.items():
        assert filled(travelling[name], variables) == filled(server, {})
        assert KEY not in json.dumps(msgspec.to_builtins(load_recorded(server)))
    kept = load_recorded(servers["b"]).url
    assert kept == "https://x.org/mcp?tavilyApiKey=[REDACTED]&key=[REDACTED]&sort_key=a-name-of-some-length"
